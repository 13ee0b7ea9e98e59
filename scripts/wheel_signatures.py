"""Reads from a wheel of FlashInfer or NIXL the signatures of what the worker calls, without installing or importing it.

python scripts/wheel_signatures.py FLASHINFER_WHEEL > tests/gpu_worker/flashinfer_signatures.json
python scripts/wheel_signatures.py NIXL_CU12_WHEEL > tests/gpu_worker/nixl_signatures.json
"""

from __future__ import annotations

import ast
import json
import sys
import zipfile
from pathlib import Path
from typing import Any

# module -> the functions, or methods of classes, that are wanted of it
WANTED = {
    "decode": [
        "BatchDecodeWithPagedKVCacheWrapper.__init__",
        "BatchDecodeWithPagedKVCacheWrapper.plan",
        "BatchDecodeWithPagedKVCacheWrapper._plan_impl",  # what the keywords of plan mean
        "BatchDecodeWithPagedKVCacheWrapper.run",
    ],
    "prefill": [
        "BatchPrefillWithPagedKVCacheWrapper.__init__",
        "BatchPrefillWithPagedKVCacheWrapper.plan",
        "BatchPrefillWithPagedKVCacheWrapper.run",
    ],
    "page": ["append_paged_kv_cache"],
    "cascade": ["merge_state_in_place"],
    "comm/allreduce": ["create_allreduce_fusion_workspace", "allreduce_fusion"],
    "comm/trtllm_ar": ["get_trtllm_comm_module"],
    "fused_moe/core": ["cutlass_fused_moe", "cutlass_fused_moe_workspace_size"],
}

WANTED_OF_NIXL = {
    "_api": [
        "nixl_agent_config.__init__",
        *(
            f"nixl_agent.{method}"
            for method in (
                "__init__",
                "register_memory",
                "deregister_memory",
                "get_agent_metadata",
                "add_remote_agent",
                "remove_remote_agent",
                "get_xfer_descs",
                "initialize_xfer",
                "transfer",
                "check_xfer_state",
                "release_xfer_handle",
                "get_new_notifs",
            )
        ),
    ]
}


def signatures(wheel: Path) -> dict[str, Any]:
    """The wheel's name, and for each wanted function its parameters as [name, kind] or [name, kind, default].

    Raises KeyError naming what the wheel lacks.
    """
    found: dict[str, Any] = {"wheel": wheel.name, "signatures": {}}
    is_nixl = wheel.name.startswith("nixl")
    package = wheel.name.partition("-")[0] if is_nixl else "flashinfer"
    with zipfile.ZipFile(wheel) as archive:
        for module, names in (WANTED_OF_NIXL if is_nixl else WANTED).items():
            functions = _functions(ast.parse(archive.read(f"{package}/{module}.py")))
            for name in names:
                found["signatures"][name] = _parameters(functions[name].args)
    return found


def _functions(tree: ast.Module) -> dict[str, ast.FunctionDef]:
    """Functions and methods by name; of overloads the last, which is the implementation."""
    found: dict[str, ast.FunctionDef] = {}
    for node in tree.body:
        if isinstance(node, ast.FunctionDef):
            found[node.name] = node
        if isinstance(node, ast.ClassDef):
            methods = [method for method in node.body if isinstance(method, ast.FunctionDef)]
            found.update({f"{node.name}.{method.name}": method for method in methods})
    return found


def _parameters(args: ast.arguments) -> list[list[Any]]:
    plain = [(arg, "POSITIONAL_ONLY") for arg in args.posonlyargs] + [(a, "POSITIONAL_OR_KEYWORD") for a in args.args]
    defaults: list[ast.expr | None] = [None] * (len(plain) - len(args.defaults)) + list(args.defaults)
    rows = [_row(arg, kind, default) for (arg, kind), default in zip(plain, defaults, strict=True)]
    if args.vararg is not None:
        rows.append([args.vararg.arg, "VAR_POSITIONAL"])
    rows += [_row(a, "KEYWORD_ONLY", default) for a, default in zip(args.kwonlyargs, args.kw_defaults, strict=True)]
    if args.kwarg is not None:
        rows.append([args.kwarg.arg, "VAR_KEYWORD"])
    return rows


def _row(arg: ast.arg, kind: str, default: ast.expr | None) -> list[Any]:
    return [arg.arg, kind] if default is None else [arg.arg, kind, _value(default)]


def _value(default: ast.expr) -> Any:
    """What is written there; of a name, which only the package could tell the value of, and of bytes their text."""
    if isinstance(default, ast.Name | ast.Attribute):
        return ast.unparse(default)
    value = ast.literal_eval(default)
    return repr(value) if isinstance(value, bytes) else value


if __name__ == "__main__":
    # One function a line: short, and a difference shows which one it is.
    table = signatures(Path(sys.argv[1]))
    lines = ",\n".join(f"  {json.dumps(name)}: {json.dumps(rows)}" for name, rows in table["signatures"].items())
    print(f'{{\n"wheel": {json.dumps(table["wheel"])},\n"signatures": {{\n{lines}\n}}\n}}')
