"""Values used before they exist, and an API in the middle of a program.

python examples/programs/trip.py [URL]
"""

import sys

import radixfleet as rf


def forecast(location, date):
    """In place of `api_url="https://..."` with allow_api_hosts(...)."""
    return f"sunny, 25 degrees in {location.strip()}"


@rf.function
def plan_trip(s):
    s += "You are a travel assistant.\n"
    s += "User: " + rf.gen("user_input") + "\n"
    dest = rf.gen("destination", max_tokens=6, stop=["\n", ","])
    date = rf.gen("date", max_tokens=8, stop=["\n", ","])
    weather = rf.gen("weather", api_url=forecast, params={"location": dest, "date": date})
    s += f"Destination:{dest}\nDate:{date}\nWeather: {weather}\nPlan:"
    s += rf.gen("final_plan", max_tokens=60)


rf.set_default_backend(rf.RuntimeEndpoint(sys.argv[1] if len(sys.argv) > 1 else "http://127.0.0.1:30000"))
plan_trip.compile(user_input="...").save_picture("trip.svg")
print(plan_trip.run(user_input="Three days in Hangzhou, from next Tuesday", temperature=0).text())
