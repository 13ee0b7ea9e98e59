"""One JSON object whose fields are written at the same time, each within its own rules.

python examples/programs/parallel_json.py [URL]
"""

import json
import sys

import radixfleet as rf

FIELDS = {
    "name": {"regex": r"[A-Z][a-z]{2,10}"},
    "age": {"regex": r"[1-9][0-9]?"},
    "house": {"regex": r"(Gryffindor|Slytherin|Ravenclaw|Hufflepuff)"},
}


@rf.function
def character(s, who):
    s += f"{who} is described by a JSON object with the fields {', '.join(FIELDS)}.\n"
    forks = s.fork(len(FIELDS))
    for fork, (field, rules) in zip(forks, FIELDS.items(), strict=True):
        fork += f'The field "{field}" is: ' + rf.gen(field, max_tokens=12, **rules)
    return {field: fork[field] for fork, field in zip(forks, FIELDS, strict=True)}


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
print(json.dumps(character.run(who="Hermione Granger", temperature=0).ret_value))
