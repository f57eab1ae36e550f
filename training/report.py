"""report.html: what a run did, on one page that needs no network and no other file."""

import html
import io
import json
import os
import re
from pathlib import Path
from typing import TYPE_CHECKING, Any

from .console import summary_rows
from .figures import Plot, build_plots
from .summary import History, RunSummary, summarize

if TYPE_CHECKING:
    from matplotlib.figure import Figure

__all__ = ["RunSummary", "write_report"]

_STYLE = """
:root { color-scheme: light; }
body { font: 15px/1.5 system-ui, -apple-system, "Segoe UI", Roboto, sans-serif; color: #1e293b; background: #f8fafc;
       margin: 0 auto; max-width: 1240px; padding: 2rem 1.25rem 4rem; }
h1 { font-size: 1.6rem; margin: 0; } h2 { font-size: 1.05rem; margin: 0 0 .4rem; }
.subtitle { color: #64748b; margin: .2rem 0 1.4rem; }
section { background: #fff; border: 1px solid #e2e8f0; border-radius: 10px; padding: 1rem 1.25rem; }
.plots { display: grid; grid-template-columns: repeat(auto-fit, minmax(min(520px, 100%), 1fr));
         gap: 1rem; margin: 1rem 0; }
.plots svg { width: 100%; height: auto; display: block; }
.caption { color: #64748b; font-size: .85rem; margin: .2rem 0 0; }
table { border-collapse: collapse; width: 100%; }
td { padding: .28rem .4rem; border-top: 1px solid #f1f5f9; } tr:first-child td { border-top: 0; }
td:first-child { color: #475569; white-space: pre; width: 1%; padding-right: 2rem; }
td:last-child { font-variant-numeric: tabular-nums; }
details { margin-top: 1rem; } summary { cursor: pointer; font-weight: 600; }
pre { overflow-x: auto; font-size: .82rem; line-height: 1.4; margin: .8rem 0 0; }
@media (max-width: 640px) { td:first-child { white-space: normal; width: auto; padding-right: .4rem; } }
"""

# No script, and nothing fetched: a browser that obeys this cannot leave the file.
_POLICY = "default-src 'none'; style-src 'unsafe-inline'"


def write_report(run_dir: Path) -> Path:
    """Write `report.html` into a run folder and return its path.

    Needs `metrics.jsonl` alone; `config.yaml`, `overrides.txt` and `versions.json` are shown where they exist. Raises
    ValueError when the folder has no records.
    """
    run_dir = Path(run_dir)
    history = History.load(run_dir)
    page = _page(run_dir.resolve().name, summarize(history), build_plots(history), _attachments(run_dir))
    path = run_dir / "report.html"
    partial = path.with_suffix(".html.tmp")
    partial.write_text(page, encoding="utf-8")
    os.replace(partial, path)
    return path


def _attachments(run_dir: Path) -> list[tuple[str, str]]:
    """(title, text) of what the run folder keeps beside its metrics."""
    found = []
    for title, name in (
        ("Resolved config", "config.yaml"),
        ("Overrides", "overrides.txt"),
        ("Versions", "versions.json"),
    ):
        path = run_dir / name
        if path.is_file():
            text = path.read_text(encoding="utf-8", errors="replace")
            found.append((title, _indented(text) if path.suffix == ".json" else text))
    return found


def _indented(text: str) -> str:
    try:
        return json.dumps(json.loads(text), indent=2)
    except ValueError:
        return text


def _page(name: str, summary: RunSummary, plots: list[Plot], attachments: list[tuple[str, str]]) -> str:
    rows = "\n".join(
        f"<tr><td>{html.escape(label)}</td><td>{html.escape(value)}</td></tr>" for label, value in summary_rows(summary)
    )
    figures = "\n".join(
        f"<section><h2>{html.escape(plot.title)}</h2>{_svg(plot.figure, index)}"
        f'<p class="caption">{html.escape(plot.caption)}</p></section>'
        for index, plot in enumerate(plots)
    )
    details = "\n".join(
        f"<details><summary>{html.escape(title)}</summary><pre>{html.escape(text)}</pre></details>"
        for title, text in attachments
    )
    title = html.escape(name)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<meta http-equiv="Content-Security-Policy" content="{_POLICY}">
<title>{title}</title>
<style>{_STYLE}</style>
</head>
<body>
<h1>{title}</h1>
<p class="subtitle">msa-pretrain run report; computed from metrics.jsonl, n/a where the run logged no value</p>
<section><h2>Summary</h2><table>
{rows}
</table></section>
<div class="plots">
{figures}
</div>
{details}
</body>
</html>
"""


def _svg(figure: "Figure", index: int) -> str:
    """The figure as an inline element: no XML header, no metadata, ids that are unique on the page."""
    import matplotlib

    buffer = io.StringIO()
    metadata: dict[str, Any] = dict.fromkeys(("Date", "Creator", "Format", "Type"))
    with matplotlib.rc_context({"svg.hashsalt": f"figure-{index}"}):
        figure.savefig(buffer, format="svg", metadata=metadata, transparent=True)
    text = buffer.getvalue()
    text = re.sub(r"\s*<metadata>.*?</metadata>", "", text[text.index("<svg") :], flags=re.DOTALL)
    text = re.sub(r'(\bid="|url\(#|href="#)', rf"\g<1>f{index}-", text)
    return re.sub(r' xmlns(:\w+)?="[^"]*"', "", text).replace("xlink:href", "href")
