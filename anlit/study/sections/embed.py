"""The section `embed`: the page of a command that the study runs afterwards."""

from typing import Any

from anlit.study.results import StudyResults


def embed(results: StudyResults, options: dict[str, Any]) -> list[str]:
    """The page in Markdown, with its headings a level lower.

    Option: `name` of the command under `after`.
    """
    name = options["name"]
    title = f"## {name.capitalize()}"
    page = results.output / name / f"{name}.md"
    if not page.is_file():
        return [title, "Not measured yet."]
    lines = []
    for line in page.read_text(encoding="utf-8").splitlines():
        lines.append(f"#{line}" if line.startswith("#") else line)
    return [title, "\n".join(lines).replace("](", f"]({name}/")]
