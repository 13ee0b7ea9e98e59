"""A small tree of thought: three first steps, two ways on from each, and a vote for the best.

python examples/programs/tree_of_thought.py [URL]
"""

import sys

import radixfleet as rf


@rf.function
def solve(s, task):
    s += rf.system("You solve problems step by step.")
    s += rf.user(task)
    ways = s.fork(3)
    ways += lambda i: rf.assistant(rf.gen("step", max_tokens=32, seed=i)) + rf.user("Go on from there and finish.")
    branches = [way.fork(2) for way in ways]
    for i, ends in enumerate(branches):
        ends += lambda j, i=i: rf.assistant(rf.gen("end", max_tokens=32, seed=10 * i + j))
    candidates = [f"{end['step']} {end['end']}" for ends in branches for end in ends]
    listing = "\n".join(f"{number}. {text}" for number, text in enumerate(candidates, 1))
    s += rf.user(f"Which of these is best?\n{listing}\nAnswer with its number.")
    s += rf.assistant(rf.select("best", [str(number) for number in range(1, len(candidates) + 1)]))
    return candidates[int(s["best"]) - 1]


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
print(solve.run(task="I have 12 apples, eat 3 and buy 5. How many do I have?", temperature=0.8).ret_value)
