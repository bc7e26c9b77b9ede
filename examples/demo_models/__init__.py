"""How the bundled demo models were made: their data, training and evaluation. Run from the repository's root.

python -m examples.demo_models.images.train --out DIR
python -m examples.demo_models.audio.evaluate --url http://127.0.0.1:8000
"""
