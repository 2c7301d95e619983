"""prl: post-training for language models, composed with Hydra."""

__version__ = "0.1.0"
