"""The bundled demo models, and examples to try them with. `examples/demo_models` made them."""
