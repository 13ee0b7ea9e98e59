"""Tips that are worked out at the same time in forks, and a summary of them.

python examples/programs/tips.py [URL]
"""

import sys

import radixfleet as rf


@rf.function
def tips(s, topic):
    s += f"Here are two tips for {topic}. 1. Plan ahead. 2. Take your time.\n\n"
    forks = s.fork(2)
    forks += lambda i: f"Now, in detail, tip {i + 1}:" + rf.gen("detail", max_tokens=40, stop="\n\n")
    forks.join()
    for i, detail in enumerate(s["detail"]):
        s += f"Tip {i + 1}:{detail}\n"
    s += "In short:" + rf.gen("summary", max_tokens=30, stop="\n")


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
state = tips.run(topic="learning to cook", temperature=0)
print(state.text())
