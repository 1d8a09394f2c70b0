"""A Sphinx directive that writes the HTTP reference from the service's own OpenAPI document."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from docutils import nodes
from sphinx.application import Sphinx
from sphinx.util.docutils import SphinxDirective

from bagua_autotune.api.openapi import document

Schema = dict[str, Any]


class OpenApi(SphinxDirective):
    """Each operation with what it takes and answers, then each message with its fields."""

    def run(self) -> list[nodes.Node]:
        described = document()
        lines = [
            *_operations(described["paths"]),
            *_statuses(described["paths"]),
            *_messages(described["components"]["schemas"]),
        ]
        return self.parse_text_to_nodes("\n".join(lines), allow_section_headings=True)


def _operations(paths: dict[str, Schema]) -> Iterator[str]:
    yield "## Requests\n"
    for path, methods in paths.items():
        for method, operation in methods.items():
            yield f"### `{method.upper()} {path}`\n"
            yield f"{operation['summary']}.\n"
            if asked := [each for each in operation["parameters"] if each["in"] == "query"]:
                words = (f"`{each['name']}` ({_kind(each['schema'])})" for each in asked)
                yield f"- Query: {', '.join(words)}"
            if body := operation.get("requestBody"):
                yield f"- Body: {_kinds(body['content'])}"
            answers = operation["responses"]
            for status, answer in answers.items():
                if int(status) < 300:
                    yield f"- Answer {status}: {_kinds(answer['content'])}"
            others = ", ".join(status for status in answers if int(status) >= 300)
            yield f"- Otherwise: {others}\n"


def _statuses(paths: dict[str, Schema]) -> Iterator[str]:
    yield "## Status codes\n"
    operations = [operation for methods in paths.values() for operation in methods.values()]
    texts = {
        status: answer["description"]
        for operation in operations
        for status, answer in operation["responses"].items()
    }
    yield from _table(("status", "meaning"), iter(sorted(texts.items())))


def _messages(schemas: dict[str, Schema]) -> Iterator[str]:
    yield "## Messages\n"
    for name, schema in sorted(schemas.items()):
        yield f"(message-{name.lower()})="
        yield f"### {name}\n"
        if said := schema.get("description"):
            yield f"{said.partition(chr(10) * 2)[0]}\n"
        required = schema.get("required", ())
        yield from _table(
            ("field", "type", "meaning"),
            (
                (
                    f"`{field}`" + ("" if field in required else " (optional)"),
                    _kind(described),
                    described.get("description", ""),
                )
                for field, described in schema.get("properties", {}).items()
            ),
        )


def _kinds(content: Schema) -> str:
    """The body of a request or of an answer, by its content type."""
    return ", ".join(f"{_kind(each['schema'])} as `{kind}`" for kind, each in content.items())


def _kind(schema: Schema) -> str:
    """What a value is, in words; a message of its own is a link."""
    if reference := schema.get("$ref"):
        name = reference.rpartition("/")[2]
        return f"[{name}](#message-{name.lower()})"
    if choices := schema.get("anyOf") or schema.get("oneOf"):
        return " or ".join(dict.fromkeys(map(_kind, choices)))
    if "const" in schema:
        return f"`{schema['const']}`"
    if "enum" in schema:
        return ", ".join(f"`{value}`" for value in schema["enum"])
    if schema.get("type") == "array":
        return f"list of {_kind(schema.get('items', {}))}"
    if schema.get("type") == "object" and isinstance(schema.get("additionalProperties"), dict):
        return f"mapping to {_kind(schema['additionalProperties'])}"
    return str(schema.get("type", "any"))


def _table(titles: tuple[str, ...], rows: Iterator[tuple[str, ...]]) -> Iterator[str]:
    listed = [_row(row) for row in rows]
    if listed:
        yield "\n".join([_row(titles), _row(("---",) * len(titles)), *listed, ""])


def _row(cells: tuple[str, ...]) -> str:
    return "| " + " | ".join(" ".join(cell.split()).replace("|", "\\|") for cell in cells) + " |"


def setup(app: Sphinx) -> dict[str, bool]:
    app.add_directive("openapi", OpenApi)
    return {"parallel_read_safe": True}
