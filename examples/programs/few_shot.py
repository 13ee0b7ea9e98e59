"""Question answering from examples, for a batch of questions: the examples are computed once.

python examples/programs/few_shot.py [URL]
"""

import sys

import radixfleet as rf

EXAMPLES = """The following are questions with short answers.

Q: What is the capital of Germany?
A: Berlin
Q: What is the capital of Italy?
A: Rome
"""


@rf.function
def answer(s, question):
    s += EXAMPLES
    s += "Q: " + question + "\n"
    s += "A:" + rf.gen("answer", stop="\n", max_tokens=16)


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
answer.explain(temperature=0.0)
questions = ["What is the capital of France?", "What is the capital of Spain?", "Who wrote Hamlet?"]
for question, state in zip(
    questions, answer.run_batch([{"question": q} for q in questions], temperature=0), strict=True
):
    print(question, state["answer"].strip())
