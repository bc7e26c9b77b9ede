"""The bundled demo models. Here: drawn scenes, how it was trained, how it is evaluated."""
