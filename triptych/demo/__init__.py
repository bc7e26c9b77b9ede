"""The bundled demo model: drawn scenes, how it was trained, how it is evaluated."""
