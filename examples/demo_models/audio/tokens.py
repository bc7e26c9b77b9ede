"""The tokenizer: digits and bytes, Whisper's special tokens, and a timestamp every 0.02 s of a window."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import WhisperTokenizer

from examples.demo_models.audio.recordings import WINDOW_SECONDS

STEP_SECONDS = 0.02
END, START, NO_TIMES = "<|endoftext|>", "<|startoftranscript|>", "<|notimestamps|>"
SPECIALS = (END, START, "<|startoflm|>", "<|startofprev|>", "<|nospeech|>", NO_TIMES)
TIMES = tuple(f"<|{step * STEP_SECONDS:.2f}|>" for step in range(round(WINDOW_SECONDS / STEP_SECONDS) + 1))


def make_tokenizer() -> WhisperTokenizer:
    """One token a byte, so that no text fails; then the special tokens, then the times."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    tokenizer = Tokenizer(models.BPE(vocab={text: index for index, text in enumerate(alphabet)}, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in SPECIALS])
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in TIMES])
    return WhisperTokenizer(
        tokenizer_object=tokenizer,
        bos_token=END,
        eos_token=END,
        unk_token=END,
        pad_token=END,
        model_max_length=64,
        additional_special_tokens=list(SPECIALS[1:]),
    )
