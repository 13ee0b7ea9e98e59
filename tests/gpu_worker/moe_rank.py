"""One rank of a model with experts: loads its part of the folder, runs a prompt, and rank 0 saves the logits.

python tests/gpu_worker/moe_rank.py FOLDER MEETING RANK SIZE
"""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[2]))

from services.gpu_worker.parallel.group import Meeting, TensorGroup
from tests.gpu_worker.tiny_models import Sequence, Session, load, random_tokens

TOKENS = 19


def main() -> None:
    folder, place, rank, size = Path(sys.argv[1]), sys.argv[2], int(sys.argv[3]), int(sys.argv[4])
    torch.set_num_threads(1)
    group = TensorGroup.join(Meeting(place, rank, size), torch.device("cpu"))
    session = Session(load(folder, model_impl="own", group=group))
    logits = session.step([(Sequence(random_tokens(TOKENS, seed=4)), TOKENS)])
    if group.leads:
        torch.save(logits, folder / "logits.pt")
    group.least(0)  # nobody leaves while another one still listens
    sys.stdout.flush()
    os._exit(0)  # as a worker does: the interpreter's end may find the group's threads at work


if __name__ == "__main__":
    main()
