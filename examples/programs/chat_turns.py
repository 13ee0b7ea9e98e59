"""A conversation in the model's own chat template, streamed as it is written.

python examples/programs/chat_turns.py [URL]
"""

import sys

import radixfleet as rf


@rf.function
def conversation(s, first, second):
    s += rf.system("You answer in one sentence.")
    s += rf.user(first)
    s += rf.assistant(rf.gen("answer_1", max_tokens=48))
    s += rf.user(second)
    s += rf.assistant(rf.gen("answer_2", max_tokens=48))


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
state = conversation.run(first="What is a radix tree?", second="And what is it good for?", temperature=0.2, stream=True)
for text in state.text_iter():
    print(text, end="", flush=True)
print()
print(state.messages()[-1])
