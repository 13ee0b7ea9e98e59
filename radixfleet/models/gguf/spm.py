"""SentencePiece vocabularies (Llama 2, Mistral) as a BPE tokenizer; leaves special tokens to `tokenizer`."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, normalizers

from radixfleet.models.gguf.metadata import Metadata

SPACE = "\u2581"  # SentencePiece's visible blank


def build_spm(meta: Metadata) -> Tokenizer:
    """BPE with byte fallback whose merges are read off the vocabulary and its scores."""
    tokens: list[str] = meta.require("tokenizer.ggml.tokens")
    scores: list[float] = meta.require("tokenizer.ggml.scores")
    vocab = {token: i for i, token in enumerate(tokens)}
    unknown = int(meta.get("tokenizer.ggml.unknown_token_id", 0))
    tokenizer = Tokenizer(
        models.BPE(
            vocab=vocab,
            merges=merges_from_scores(tokens, scores),
            unk_token=tokens[unknown],
            fuse_unk=True,
            byte_fallback=True,
        )
    )
    prefixed = bool(meta.get("tokenizer.ggml.add_space_prefix", True))
    steps: list[normalizers.Normalizer] = [normalizers.Prepend(SPACE)] if prefixed else []
    tokenizer.normalizer = normalizers.Sequence([*steps, normalizers.Replace(" ", SPACE)])
    parts: list[decoders.Decoder] = [decoders.Replace(SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    if prefixed:
        parts.append(decoders.Strip(content=" ", left=1))
    tokenizer.decoder = decoders.Sequence(parts)
    return tokenizer


def merges_from_scores(tokens: list[str], scores: list[float]) -> list[tuple[str, str]]:
    """Every way to put a token together from two others, best score first (SentencePiece's merge order)."""
    vocab = {token: i for i, token in enumerate(tokens)}
    found: list[tuple[float, int, int, str, str]] = []
    for token, score in zip(tokens, scores, strict=True):
        for cut in range(1, len(token)):
            left, right = vocab.get(token[:cut]), vocab.get(token[cut:])
            if left is not None and right is not None:
                found.append((-score, left, right, token[:cut], token[cut:]))
    found.sort(key=lambda item: item[:3])
    return [(left, right) for _, _, _, left, right in found]
