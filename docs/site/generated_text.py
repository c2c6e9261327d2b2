"""Write the generated parts of pages: the references, and the tables that follow from the code.

    python docs/site/generated_text.py        # `make docs-text`

A generated part of a page is between ``<!-- generated: NAME -->`` and ``<!-- end of NAME -->``. The repository contains
it, so that GitHub shows it. A test compares it with this script's output.
"""

import inspect
import json
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import fields
from pathlib import Path
from typing import Any

import typer.main

import volseg.parallel.spatial.operators  # fills the operator table
from volseg.checkpointing.compatible import RULES, list_keys
from volseg.checkpointing.state import TrainingState
from volseg.cli import app
from volseg.config.schema import ExperimentConfig
from volseg.parallel.spatial.table import documented

DOCS = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(DOCS.parent / "datasets"))

from plan_msd import make_table  # noqa: E402  (a script, not a package)

GENERATED = re.compile(r"(<!-- generated: ([a-z ]+?) -->\n).*?\n?(<!-- end of \2 -->)", re.S)


def with_generated_text(page: str) -> str:
    """Return the text of a page with its generated parts brought up to date."""
    return GENERATED.sub(lambda part: f"{part[1]}{MAKERS[part[2]]()}\n{part[3]}", page)


def table(*rows: Sequence[str]) -> str:
    """Return a Markdown table; the first row is its head."""
    head, *rest = (" | ".join(["", *map(cell, row), ""]).strip() for row in rows)
    return "\n".join([head, "|" + " --- |" * len(rows[0]), *rest])


def cell(text: str) -> str:
    """Return text as the cell of a table."""
    return plain(text).replace("|", "\\|")


def plain(text: str) -> str:
    """Return text of a docstring as one line of Markdown."""
    return " ".join(text.replace("``", "`").split())


def make_command_line() -> str:
    """Return each command with its arguments and options, in the order of ``volseg --help``."""
    commands = [verb for verb in typer.main.get_command(app).commands.values() if not verb.hidden]
    panels = dict.fromkeys(verb.rich_help_panel for verb in commands)
    parts = []
    for panel in panels:
        parts.append(f"## {panel}")
        parts += [part for verb in commands if verb.rich_help_panel == panel for part in describe_command(verb)]
    return "\n\n".join(parts)


def describe_command(command: Any, prefix: str = "volseg") -> Iterator[str]:
    """Yield the description of a command, and of those below it."""
    name = f"{prefix} {command.name}"
    children = getattr(command, "commands", {}).values()
    yield f"### {name}"
    yield "\n\n".join(plain(part) for part in command.help.split("\n\n"))
    context = typer.Context(command, info_name=name)
    records = [option.get_help_record(context) for option in command.params if not getattr(option, "hidden", False)]
    rows = [(f"`{format_option(names)}`", text) for names, text in filter(None, records)]
    if rows:
        yield table(("argument or option", "meaning"), *rows)
    if command.epilog:
        example, *notes = command.epilog.removeprefix("Example: ").split("\n\n")
        yield "\n\n".join([f"Example: `{plain(example)}`", *map(plain, notes)])
    for child in children:
        yield from describe_command(child, name)


def format_option(names: str) -> str:
    """Return an option or argument with its value in capitals: ``--cases <int>`` as ``--cases INT``."""
    names, _, kind = names.removesuffix(">").partition(" <")
    return (f"{names} {kind.upper()}" if kind and names.startswith("-") else names).replace("|", " or ")


def make_config() -> str:
    """Return a table of keys for each section of the config."""
    schema = ExperimentConfig.model_json_schema()
    names = {"": schema, **dict(list_sections(schema, schema["$defs"]))}
    return "\n\n".join(describe_section(name, part, names) for name, part in names.items())


def list_sections(schema: dict[str, Any], definitions: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the sections of a config by their dotted keys, each behind the section that holds it."""
    for key, part in schema["properties"].items():
        for definition in definitions_in(part):
            if "properties" in definitions[definition]:
                yield f"{prefix}{key}", definitions[definition]
                yield from list_sections(definitions[definition], definitions, f"{prefix}{key}.")


def definitions_in(schema: Any) -> Iterator[str]:
    """Yield the names of the definitions that a part of a JSON schema refers to."""
    if isinstance(schema, dict):
        if "$ref" in schema:
            yield schema["$ref"].rpartition("/")[2]
        for part in schema.values():
            yield from definitions_in(part)
    elif isinstance(schema, list):
        for part in schema:
            yield from definitions_in(part)


def describe_section(name: str, schema: dict[str, Any], sections: dict[str, Any]) -> str:
    """Return heading, description and table of a section."""
    rows = [("key", "values", "default", "meaning")]
    for key, part in schema["properties"].items():
        path = f"{name}.{key}".removeprefix(".")
        link = path.replace(".", "").lower()
        named = f"[`{key}`](#{link})" if path in sections else f"`{key}`"
        default = f"`{json.dumps(part['default'])}`" if "default" in part and "$ref" not in part else ""
        required = "required" if key in schema.get("required", ()) else default
        meaning = part.get("description") or sections.get(path, {}).get("description", "")
        rows.append((named, describe_type(part), required, meaning))
    title = f"`{name}`" if name else "Top level"
    return "\n\n".join([f"## {title}", *filter(None, [plain(schema.get("description", ""))]), table(*rows)])


BOUNDS = {"minimum": ">= {}", "exclusiveMinimum": "> {}", "maximum": "<= {}", "exclusiveMaximum": "< {}"}
KINDS = {
    "integer": "integer",
    "number": "number",
    "string": "text",
    "object": "mapping",
    "null": "`null`",
    "boolean": "`true`, `false`",
}


def describe_type(schema: dict[str, Any]) -> str:
    """Return the values of a key in words."""
    if "anyOf" in schema:
        return ", or ".join(describe_type(part) for part in schema["anyOf"])
    if "$ref" in schema:
        return "section"
    if "enum" in schema or "const" in schema:
        return ", ".join(f"`{value}`" for value in schema.get("enum", [schema.get("const")]))
    if "prefixItems" in schema:
        return f"list of {len(schema['prefixItems'])}: {describe_type(schema['prefixItems'][0])}"
    if schema.get("type") == "array":
        return f"list of: {describe_type(schema.get('items', {}))}"
    kind = "path" if schema.get("format") == "path" else KINDS.get(schema.get("type", ""), "any")
    bounds = [words.format(schema[key]) for key, words in BOUNDS.items() if key in schema and schema[key] < 2**31]
    return " ".join([kind, *bounds])


PUBLIC = {
    "Whole experiments": "load_config train cross_validate validate predict load",
    "A training loop of your own": "Named Training Validation Testing Predictor build_network Hook Checkpoints "
    "Patience Progress TrainingLog TensorBoard",
    "Several GPUs": "ModelParallel FastKernels plan parallel.verify parallel.Pipeline parallel.pointwise_function "
    "parallel.scatter_batch parallel.from_slab parallel.launch",
    "Data and scores": "load_task make_task read_volume evaluate_folders data.check_task data.repair_task data.Read "
    "planning.write_config inference.postprocessing.Postprocessing",
    "Components of your own": "register load_components",
    "Errors": "VolsegError errors",
}
"""Names of the reference below ``volseg``, by heading."""


def make_python() -> str:
    """Return signature, parameters, results and errors of each public name."""
    parts = []
    for title, names in PUBLIC.items():
        parts.append(f"## {title}")
        for name in names.split():
            found: Any = volseg
            for step in name.split("."):
                found = getattr(found, step)
            parts += describe_object(f"volseg.{name}", found)
    return "\n\n".join(parts)


def describe_object(name: str, found: Any) -> Iterator[str]:
    """Yield the parts of the description of a function, class or module."""
    yield f"### {name}"
    text, *sections = split_docstring(found)
    parameters = dict(inspect.signature(found).parameters) if takes_parameters(found) else {}
    if parameters:
        yield f"`{name.rpartition('.')[2]}({format_parameters(parameters)})`"
    yield text[1].partition("\n\n")[0] if inspect.ismodule(found) else text[1]
    for title, body in sections:
        entries = list(list_entries(body))
        if title in ("Parameters", "Attributes"):
            rows = [(f"`{key}`", kind or format_type(parameters.get(key)), meaning) for key, kind, meaning in entries]
            yield table((title.removesuffix("s").lower(), "type", "meaning"), *rows)
        elif title in ("Returns", "Yields", "Raises"):
            yield "\n".join(f"- {title} {key}: {plain(meaning)}" for key, _, meaning in entries)
        elif title == "Examples":
            yield f"```pycon\n{body}\n```"
        else:
            yield f"{title}: {plain(body)}"
    if inspect.ismodule(found):
        yield table(*list_errors(found))
    elif methods := list_methods(found):
        yield table(("method", "meaning"), *methods)


def takes_parameters(found: Any) -> bool:
    """Say whether something is a function, or a class that is not an error."""
    return callable(found) and not (inspect.isclass(found) and issubclass(found, Exception))


def list_errors(module: Any) -> Iterator[tuple[str, str, str]]:
    """Yield the names of a module's errors, the errors that each of them also is, and what each means."""
    yield "error", "is a", "meaning"
    for name in module.__all__:
        error = getattr(module, name)
        bases = ", ".join(f"`{base.__name__}`" for base in error.__bases__)
        yield f"`{name}`", bases, (inspect.getdoc(error) or "").partition("\n\n")[0]


def split_docstring(found: Any) -> Iterator[tuple[str, str]]:
    """Yield the sections of a numpydoc docstring: title and body; the text before them has no title."""
    first, *rest = re.split(r"^(\w+)\n-{3,}\n", inspect.getdoc(found) or "", flags=re.M)
    yield "", "\n\n".join(plain(part) for part in first.strip().split("\n\n"))
    yield from zip(rest[::2], (body.strip() for body in rest[1::2]), strict=True)


def list_entries(body: str) -> Iterator[tuple[str, str, str]]:
    """Yield name, type and meaning of what a section lists."""
    for entry in re.split(r"\n(?=\S)", body):
        head, _, meaning = entry.partition("\n")
        name, _, kind = head.partition(" : ")
        yield name, kind.replace("|", "or"), meaning


def list_methods(found: Any) -> list[tuple[str, str]]:
    """Return calls and first sentences of the public methods that a class itself defines."""
    methods = []
    for name, method in vars(found).items() if inspect.isclass(found) else ():
        function = getattr(method, "__func__", method)
        if inspect.isfunction(function) and not name.startswith("_") and function.__doc__:
            parameters = dict(inspect.signature(getattr(found, name)).parameters)
            parameters.pop("self", None)
            sentence = function.__doc__.strip().partition("\n\n")[0]
            methods.append((f"`{name}({format_parameters(parameters)})`", sentence))
    return methods


def format_parameters(parameters: dict[str, inspect.Parameter]) -> str:
    """Return parameters as in a call, with their defaults and without types."""
    shown = inspect.Signature(
        [one.replace(annotation=inspect.Parameter.empty) for one in parameters.values()], __validate_parameters__=False
    )
    named = re.sub(r"<function [^ ]*<lambda> at \w+>", "...", str(shown))
    return re.sub(r"<(?:built-in )?(?:function|class) '?(?:[\w.]+\.)?(\w+)[^>]*>", r"\1", named)[1:-1]


def format_type(parameter: inspect.Parameter | None) -> str:
    """Return the annotation of a parameter without the modules of its names."""
    if parameter is None or parameter.annotation is parameter.empty or parameter.kind is parameter.VAR_KEYWORD:
        return ""
    kind = inspect.formatannotation(parameter.annotation)
    return re.sub(r"\b(?:\w+\.)+(?=\w)", "", kind).replace(" | ", " or ")


def make_operators() -> str:
    """Return the functions that run on slabs, by family."""
    rows = [(family, ", ".join(f"`{name}`" for name in names)) for family, names in sorted(documented().items())]
    return table(("family", "functions"), *rows)


def make_checkpoint() -> str:
    """Return the table of a checkpoint's contents."""
    rows = [(f"`{known.name}`", known.metadata["holds"]) for known in fields(TrainingState)]
    return table(("key", "contents"), *rows)


def make_resume() -> str:
    """Return the table of values that may differ on resume; a section of the config has an asterisk."""
    rows = [("what", "on resume", "why", "kept in")]
    for what, rule in RULES.items():
        keys = ", ".join(f"`{key}*`" if key.endswith(".") else f"`{key}`" for key in list_keys(what))
        rows.append((keys or what, rule.resume, rule.why, f"`{rule.kept_in}`"))
    return table(*rows)


MAKERS: dict[str, Callable[[], str]] = {
    "command line": make_command_line,
    "config": make_config,
    "python": make_python,
    "operators": make_operators,
    "checkpoint": make_checkpoint,
    "resume": make_resume,
    "tasks": make_table,
}


def main() -> None:
    """Write the generated parts of all pages."""
    for page in sorted(DOCS.rglob("*.md")):
        before = page.read_text(encoding="utf-8")
        after = with_generated_text(before)
        if after != before:
            page.write_text(after, encoding="utf-8")
            print(f"{page.relative_to(DOCS.parent)}: written")


if __name__ == "__main__":
    main()
