"""The token that ends a document, in tokenizers made by others. No imports: ``koushi check`` reads it."""

from __future__ import annotations

END_NAMES = (
    "<|end_of_text|>",
    "<|endoftext|>",
    "</s>",
    "<eos>",
    "<|eos|>",
    "<|endofdocument|>",
    "<|end▁of▁sentence|>",
    "<\uff5cend▁of▁sentence\uff5c>",
    "<EOS>",
    "[EOS]",
    "<EOD>",
    "<|eod|>",
)
"""What published tokenizers call the token that ends a document, the likeliest first."""
