"""What the bundled tiny model is, as the tests of vLLM need it."""

VOCAB = 264
EOS = 7
MAX_MODEL_LEN = 512
