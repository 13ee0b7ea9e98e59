"""lm-eval's local-completions on a task of our own: scored choices and generation. argv[1] is the server's URL."""

import json
import sys
import tempfile
import urllib.request
from pathlib import Path

import lm_eval
from lm_eval.tasks import TaskManager

QUESTIONS = [
    ("The capital of France is", ["Paris", "a kind of cheese", "seven"], 0),
    ("Two plus two is", ["purple", "four", "Tuesday"], 1),
    ("The opposite of hot is", ["cold", "window", "running"], 0),
    ("Grass is usually", ["metallic", "asleep", "green"], 2),
    ("A week has", ["no colour", "seven days", "been eaten"], 1),
    ("Fish live in", ["water", "books", "numbers"], 0),
]
TASK = """
task: our_choices
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{question}}"
doc_to_choice: "{{choices}}"
doc_to_target: answer
metric_list: [{metric: acc}]
"""
GENERATION = """
task: our_generation
dataset_path: json
dataset_kwargs: {data_files: {test: DATA}}
test_split: test
output_type: generate_until
doc_to_text: "{{question}}"
doc_to_target: "{{choices[answer]}}"
generation_kwargs: {until: ["."], max_gen_toks: 12, do_sample: false}
metric_list: [{metric: exact_match}]
"""

with urllib.request.urlopen(sys.argv[1] + "/get_model_info") as answer:
    tokenizer = json.load(answer)["tokenizer_path"]
with tempfile.TemporaryDirectory() as name:
    folder = Path(name)
    rows = [json.dumps({"question": q, "choices": c, "answer": a}) for q, c, a in QUESTIONS]
    (folder / "data.jsonl").write_text("\n".join(rows))
    for file, task in (("choices.yaml", TASK), ("generation.yaml", GENERATION)):
        (folder / file).write_text(task.replace("DATA", str(folder / "data.jsonl")))
    results = lm_eval.simple_evaluate(
        model="local-completions",
        model_args={
            "model": "default",
            "base_url": sys.argv[1] + "/v1/completions",
            "tokenizer": tokenizer,
            "tokenizer_backend": "huggingface",
            "num_concurrent": 2,
            "max_retries": 1,
        },
        tasks=["our_choices", "our_generation"],
        task_manager=TaskManager(include_path=str(folder)),
        bootstrap_iters=0,
    )
assert results is not None
assert results["results"]["our_choices"]["acc,none"] >= 0.8, results["results"]
assert len(results["samples"]["our_generation"]) == len(QUESTIONS)
