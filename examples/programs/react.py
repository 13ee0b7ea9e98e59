"""Reason and act: the model chooses a tool with select, a Python function does the work.

python examples/programs/react.py [URL]
"""

import sys

import radixfleet as rf

FACTS = {"france": "The capital of France is Paris.", "spain": "The capital of Spain is Madrid."}


def look_up(word):
    return FACTS.get(word.strip().lower(), "Nothing is known about that.")


@rf.function
def react(s, question):
    s += "Answer the question with the tools Search and Finish.\n"
    s += "Question: What is the capital of Spain?\nAction 1: Search[Spain]\n"
    s += "Observation 1: The capital of Spain is Madrid.\nAction 2: Finish[Madrid]\n\n"
    s += f"Question: {question}\n"
    for number in range(1, 4):
        s += f"Action {number}: " + rf.select("action", ["Search", "Finish"])
        word = rf.gen("word", stop="]", max_tokens=12)
        s += "[" + word + "]\n"
        if s["action"] == "Finish":
            return s["word"]
        s += f"Observation {number}: " + rf.gen(f"fact_{number}", api_url=look_up, params={"word": word}) + "\n"
    return None


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
state = react.run(question="What is the capital of France?", temperature=0)
print(state.text())
