"""The bundled audio demo: dial tones, the model that writes their digits, its training and evaluation."""
