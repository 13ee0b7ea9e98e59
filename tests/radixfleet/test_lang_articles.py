# ruff: noqa: E501 - the programs stand here as they were printed
"""The programs that introduce the language, as they are printed but for the name of the package."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from typing import Any
from urllib.parse import parse_qs

import pytest

import radixfleet
from radixfleet import ApiCallError
from tests.radixfleet.fake_model_server import END, FakeServer
from tests.radixfleet.fake_weather import fake_weather

JSON_PROGRAM = r"""
from radixfleet import function, gen, set_default_backend, Runtime

@function
def json_output(s):
    s += "请生成用户信息，格式为：{ \"name\": \"xxx\", \"age\": 数字, \"city\": \"xxx\" }"
    # 使用正则强制约束输出格式
    s += gen("json", max_tokens=100, regex=r'\{\s*\"name\"\s*:\s*\"[^\"]+\"\s*,\s*\"age\"\s*:\s*\d+\s*,\s*\"city\"\s*:\s*\"[^\"]+\"\s*\}')

# 后端自动编译正则为FSM，无需手动干预
backend = Runtime(model_path="meta-llama/Llama-3-8b-chat-hf")
set_default_backend(backend)
ret = json_output.run()
print(ret["json"])  # 输出必为合法JSON，零重试
"""

TRIP_PROGRAM = """
from radixfleet import function, gen

@function
def plan_trip(s):
    s += "你是一个旅行助手。根据用户需求，分步规划行程。"
    # 第一步：识别目的地和日期
    s += "用户说：" + gen("user_input")
    dest = gen("destination", max_tokens=20)
    date = gen("date", max_tokens=15)
    # 第二步：调用天气API（模拟）
    weather = gen("weather", max_tokens=50, api_url="https://api.weather.com/v3/weather/forecast", params={"location": dest, "date": date})
    # 第三步：综合生成建议
    s += f"目的地：{dest}，日期：{date}，天气：{weather}"
    s += gen("final_plan", max_tokens=200)

# 一行启动，无需手动管理batch、cache、stream
ret = plan_trip.run(user_input="去杭州玩三天，下周二出发")
"""


@pytest.fixture
def weather() -> Iterator[Any]:
    with fake_weather() as server:
        yield server


def execute(source: str) -> dict[str, Any]:
    namespace: dict[str, Any] = {}
    exec(compile(source, "article", "exec"), namespace)
    return namespace


class _Runtime:
    """In place of one that starts a server with the article's model."""

    def __init__(self, model_path: str) -> None:
        assert model_path == "meta-llama/Llama-3-8b-chat-hf"
        self.endpoint = radixfleet.RuntimeEndpoint(_Runtime.url)

    url = ""


def test_the_json_program(
    fake: FakeServer, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    written = '{ "name": "小明", "age": 7, "city": "杭州" }'
    fake.answers['"city": "xxx" }'] = written + END
    _Runtime.url = fake.url
    monkeypatch.setattr(radixfleet, "Runtime", _Runtime, raising=False)
    execute(JSON_PROGRAM)
    [request] = fake.generations()
    pattern = request["sampling_params"]["regex"]
    assert re.fullmatch(pattern, written)
    assert request["sampling_params"]["max_new_tokens"] == 100
    assert json.loads(capsys.readouterr().out)["city"] == "杭州"


def test_the_trip_program(fake: FakeServer, weather: Any) -> None:
    fake.answers["目的地："] = "杭州" + END
    fake.answers["日期："] = "下周二" + END
    fake.answers["天气：晴，25℃"] = "第一天去西湖。" + END
    state = execute(TRIP_PROGRAM)["ret"]
    assert state["user_input"] == "去杭州玩三天，下周二出发"
    assert state.text() == (
        "你是一个旅行助手。根据用户需求，分步规划行程。用户说：去杭州玩三天，下周二出发"
        "目的地：杭州，日期：下周二，天气：晴，25℃第一天去西湖。"
    )
    [asked] = weather.asked
    assert asked.path == "/v3/weather/forecast"
    assert parse_qs(asked.query) == {"location": ["杭州"], "date": ["下周二"]}
    assert [body["sampling_params"]["max_new_tokens"] for body in fake.generations()] == [20, 15, 200]


def test_the_trip_program_without_permission(fake: FakeServer) -> None:
    with pytest.raises(ApiCallError, match=r"radixfleet\.allow_api_hosts\('api\.weather\.com'\)"):
        execute(TRIP_PROGRAM)


def test_the_graph_of_the_trip_program(fake: FakeServer, weather: Any) -> None:
    program = execute(TRIP_PROGRAM)["plan_trip"]
    graph = program.trace(user_input="x")
    assert [node.label for node in graph.of_kind("gen", "call")] == ["destination", "date", "weather", "final_plan"]
    [call] = graph.of_kind("call")
    assert [graph.nodes[number].label for number in call.uses] == ["destination", "date"]
    assert "text before a call is computed while it runs: weather" in program.compile(user_input="x").text()


def test_the_version_is_printed() -> None:
    assert re.fullmatch(r"\d+\.\d+\.\d+.*", radixfleet.__version__)
