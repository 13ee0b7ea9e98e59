"""Parts of weights: put together again they are the whole, and every rank's layers have their shapes."""

from __future__ import annotations

import pytest
import torch

from services.gpu_worker.models.config import ModelError
from services.gpu_worker.models.decoder import Decoder
from services.gpu_worker.models.families import read_decoder_config
from services.gpu_worker.parallel.messages import SlotNews, decoder, encode
from services.gpu_worker.parallel.sharding import Shard
from services.gpu_worker.parallel.start import arguments
from shared.config import WorkerConfig, load

CONFIG = {
    "vocab_size": 101,
    "hidden_size": 32,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "attention_bias": True,
    "mlp_bias": True,
    "tie_word_embeddings": False,
}
WHOLE = read_decoder_config("LlamaForCausalLM", CONFIG)


def names_and_shapes() -> dict[str, tuple[int, ...]]:
    decoder = Decoder(WHOLE, torch.float32, torch.device("cpu"), max_context=16)
    return {name: tuple(target.shape) for name, target in decoder.targets().items()}


@pytest.mark.parametrize("size", [1, 2])
def test_parts_are_the_whole_again(size: int) -> None:
    for name, shape in names_and_shapes().items():
        whole = torch.randn(shape)
        parts = [Shard(rank, size).part(name, whole) for rank in range(size)]
        if parts[0].shape == whole.shape and size > 1:
            bias = name.endswith(("o_proj.bias", "down_proj.bias"))
            assert torch.equal(sum(parts) if bias else parts[1], whole), name
        else:
            columns = name.endswith(("o_proj.weight", "down_proj.weight"))
            assert torch.equal(torch.cat(parts, dim=1 if columns else 0), whole), name
        if name != "lm_head.weight":
            assert Shard(0, size).whole_shape(name, parts[0].shape) == shape


def test_every_row_of_the_vocabulary_is_on_one_rank() -> None:
    for size in (1, 2, 3, 7):
        rows = [row for rank in range(size) for row in Shard(rank, size).vocabulary(WHOLE.vocab_size)]
        assert rows == list(range(WHOLE.vocab_size))


def test_the_layers_of_a_rank_and_what_cannot_be_divided() -> None:
    own = Shard(1, 2).config(WHOLE)
    assert (own.num_heads, own.kv_heads, own.intermediate, own.hidden) == (2, 1, 12, 32)
    with pytest.raises(ModelError, match="4 query heads do not divide by --tp-size 3"):
        Shard(0, 3).config(WHOLE)
    with pytest.raises(ModelError, match="2 key heads do not divide by --tp-size 4"):
        Shard(0, 4).config(WHOLE)


def test_a_rank_is_started_with_the_configuration_of_rank_0() -> None:
    config = WorkerConfig(model_path="/m", deterministic=True, tp_size=2, scheduler="ipc:///x", mem_fraction_static=0.5)
    again = load(WorkerConfig, arguments(config), environ={})
    assert (again.model_path, again.deterministic, again.tp_size, again.mem_fraction_static) == ("/m", True, 2, 0.5)
    assert again.scheduler == WorkerConfig().scheduler


def test_news_of_slots_survive_the_wire() -> None:
    news = SlotNews(b"\x01\0\0\0", b"\x05\0\0\0", b"\x02\0\0\0", b"\x00")
    assert decoder.decode(encode(news)) == news
