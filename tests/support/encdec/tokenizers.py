"""Small real tokenizers in the styles of the encoder-decoder families."""

from __future__ import annotations

from tokenizers import AddedToken, Tokenizer, decoders, models, normalizers, pre_tokenizers, processors
from transformers import PreTrainedTokenizerFast, WhisperTokenizer

from support.data.tokenizers import PIECES, byte_alphabet, learnt

BART_SPECIALS = ("<s>", "<pad>", "</s>", "<unk>", "<mask>")
T5_SPECIALS = ("<pad>", "</s>", "<unk>")
WHISPER_LANGUAGES = ("en", "zh", "de", "es", "fr")
WHISPER_SPECIALS = (
    "<|endoftext|>",
    "<|startoftranscript|>",
    *(f"<|{language}|>" for language in WHISPER_LANGUAGES),
    "<|translate|>",
    "<|transcribe|>",
    "<|startoflm|>",
    "<|startofprev|>",
    "<|nospeech|>",
    "<|notimestamps|>",
)
WHISPER_TIMES = tuple(f"<|{step * 0.02:.2f}|>" for step in range(1501))


def bart_tokenizer(vocab_size: int, language: str = "<s>") -> PreTrainedTokenizerFast:
    """Byte-level BPE, special tokens first, `<s>` or a language's, and `</s>` around every text."""
    tokenizer = Tokenizer(models.BPE(*learnt("gpt2", [*BART_SPECIALS, *byte_alphabet()], vocab_size)))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in BART_SPECIALS])
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{language} $A </s>",
        pair=f"{language} $A </s> </s> $B </s>",
        special_tokens=[(language, BART_SPECIALS.index(language)), ("</s>", 2)],
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        bos_token="<s>",
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        mask_token="<mask>",
        model_max_length=256,
    )


def t5_tokenizer(vocab_size: int) -> PreTrainedTokenizerFast:
    """Unigram pieces with `▁` for spaces, `</s>` behind every text. Marian has the same form."""
    head = [(text, 0.0) for text in T5_SPECIALS]
    pieces = [(piece, score) for piece, score in PIECES["unigram"][: vocab_size - len(head)]]
    tokenizer = Tokenizer(models.Unigram([*head, *pieces], unk_id=T5_SPECIALS.index("<unk>")))
    tokenizer.add_special_tokens([AddedToken(text, special=True, normalized=False) for text in T5_SPECIALS])
    tokenizer.normalizer = normalizers.NFKC()
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Metaspace()
    tokenizer.post_processor = processors.TemplateProcessing(
        single="$A </s>", pair="$A </s> $B </s>", special_tokens=[("</s>", 1)]
    )
    return PreTrainedTokenizerFast(
        tokenizer_object=tokenizer,
        eos_token="</s>",
        pad_token="<pad>",
        unk_token="<unk>",
        model_max_length=4096,
    )


def whisper_tokenizer(text_size: int) -> WhisperTokenizer:
    """Byte-level BPE of `text_size` pieces, then Whisper's special tokens, then its 1501 times."""
    tokenizer = Tokenizer(models.BPE(*learnt("gpt2", byte_alphabet(), text_size)))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(
        [AddedToken(text, special=True, normalized=False) for text in WHISPER_SPECIALS]
    )
    tokenizer.add_tokens([AddedToken(text, special=False, normalized=False) for text in WHISPER_TIMES])
    return WhisperTokenizer(
        tokenizer_object=tokenizer,
        bos_token="<|endoftext|>",
        eos_token="<|endoftext|>",
        unk_token="<|endoftext|>",
        pad_token="<|endoftext|>",
        model_max_length=448,
        additional_special_tokens=list(WHISPER_SPECIALS[1:]),
    )
