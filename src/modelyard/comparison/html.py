"""The leaderboard as one HTML file that needs nothing else: no network, no scripts."""

from __future__ import annotations

import math
from html import escape

from modelyard.comparison.board import BEST, TIED, WORSE, Entrant, Leaderboard
from modelyard.comparison.plots import COLOURS, LONGEST, Point, scatter
from modelyard.comparison.wording import COSTS, LEGEND, MARKS, heading, is_share, number, over_datasets, rank
from modelyard.config.yaml_file import inline

_PLOTTED = ("flops", "parameters", "seconds")
_STYLE = """
:root{color-scheme:light dark;--paper:#fff;--ink:#1c2024;--faint:#667078;--line:#dde2e6;--soft:#f4f6f8;--best:#0b7a4b;
--bar:#7aa7e0;--bad:#b3261e}
@media (prefers-color-scheme:dark){:root{--paper:#14171a;--ink:#e6e9ec;--faint:#98a2ab;--line:#333a41;--soft:#1d2226;
--best:#5fd39b;--bar:#3f6fae;--bad:#ff8a80}}
*{box-sizing:border-box}
body{margin:0 auto;max-width:1280px;padding:1.2rem;background:var(--paper);color:var(--ink);
font:16px/1.5 system-ui,-apple-system,"Segoe UI",Roboto,"DejaVu Sans",sans-serif}
h1{font-size:1.5rem;margin:.2rem 0}
h2{font-size:1.15rem;margin:2rem 0 .6rem}h3{font-size:.95rem;margin:0 0 .3rem;font-weight:600}
p{margin:.5rem 0 1rem;color:var(--faint)}
.scroll{overflow-x:auto;border:1px solid var(--line);border-radius:8px}
table{border-collapse:collapse;width:100%;font-size:.92rem;font-variant-numeric:tabular-nums}
th,td{padding:.5rem .7rem;text-align:right;white-space:nowrap;border-bottom:1px solid var(--line)}
tr:last-child td,tr:last-child th{border-bottom:0}
thead th{background:var(--soft);font-weight:600;color:var(--faint)}
th:first-child,td:first-child{text-align:left;position:sticky;left:0;background:var(--paper);min-width:14rem;max-width:24rem;
white-space:normal;overflow-wrap:break-word}
thead th:first-child{background:var(--soft)}
tbody th{font-weight:600}
.best{color:var(--best);font-weight:700}.tied{color:var(--best)}.spread,.seeds,.gap{color:var(--faint);font-weight:400}
.mark{display:inline-block;width:1.1em;text-align:center}
.rank{min-width:9rem}.rank div{display:flex;align-items:center;gap:.5rem;justify-content:flex-end}
.rank i{display:block;height:.7rem;border-radius:3px;background:var(--bar)}.rank span{flex:1;display:block}
.plots{display:grid;grid-template-columns:repeat(auto-fit,minmax(min(100%,340px),1fr));gap:1rem}
figure{margin:0;border:1px solid var(--line);border-radius:8px;padding:.7rem}
svg{display:block;width:100%;height:auto;font:12px system-ui,"DejaVu Sans",sans-serif}
.grid{stroke:var(--line);stroke-width:1}.tick,.axis{fill:var(--faint)}.name{fill:var(--ink)}
.bar{fill:none;stroke:var(--c);stroke-width:1.5}circle{fill:var(--c);stroke:var(--paper);stroke-width:1.2}
.c0{--c:#3b76c4}.c1{--c:#d9822b}.c2{--c:#2c9c69}.c3{--c:#c9485b}.c4{--c:#8661c1}.c5{--c:#8a6d3b}.c6{--c:#d269a8}
.c7{--c:#4aa3b0}
.options{font-size:.8rem;font-weight:400;color:var(--faint);display:block;line-height:1.35}
.option{display:inline-block;max-width:100%;overflow-wrap:anywhere;margin-right:.4em}
.number{color:var(--faint);font-weight:400;margin-right:.5em}
details{margin:0 0 .7rem;color:var(--faint);font-size:.88rem}summary{cursor:pointer}
details ol{margin:.3rem 0;padding-left:2.2rem}
li::marker{color:var(--c,inherit);font-weight:700}
ul{padding-left:1.2rem;color:var(--faint)}li{overflow-wrap:anywhere}
li b{color:var(--ink);font-weight:600}.failed{color:var(--bad)}
@media (max-width:600px){body{padding:.8rem}th,td{padding:.45rem .5rem}
th:first-child,td:first-child{min-width:9.5rem;max-width:9.5rem}
.rank{min-width:6rem}}
"""


def page(board: Leaderboard) -> str:
    """The whole file. Every name in it comes from strangers and is escaped."""
    title = f"Leaderboard: {heading(board)}"
    parts = [
        '<!doctype html>\n<html lang="en"><head><meta charset="utf-8">',
        '<meta name="viewport" content="width=device-width,initial-scale=1">',
        "<meta http-equiv=\"Content-Security-Policy\" content=\"default-src 'none'; style-src 'unsafe-inline'\">",
        f"<title>{escape(title)}</title><style>{_STYLE}</style></head><body>",
        f"<h1>Leaderboard</h1><p>{escape(heading(board).capitalize())}. {_sizes(board)}</p>",
        _table(board),
        f"<p>{escape(LEGEND)}</p>",
    ]
    if board.notes:
        parts.append("<ul>" + "".join(f"<li>{escape(note)}</li>" for note in board.notes) + "</ul>")
    parts += [_plots(board, dataset) for dataset in board.datasets]
    if board.unfinished:
        parts.append("<h2>Not counted</h2><ul>")
        for run in board.unfinished:
            status = f'<span class="failed">{escape(run.status)}</span>' if run.reason else escape(run.status)
            more = f" – {escape(run.reason)}" if run.reason else ""
            parts.append(f"<li><b>{escape(run.name)}</b>: {status}{more}</li>")
        parts.append("</ul>")
    return "".join([*parts, "</body></html>\n"])


def _sizes(board: Leaderboard) -> str:
    runs = sum(score.n for entrant in board.entrants for score in entrant.scores.values())
    counts = ((len(board.entrants), "model"), (len(board.datasets), "dataset"), (runs, "run"))
    return ", ".join(f"{count} {what}{'s' if count != 1 else ''}" for count, what in counts) + "."


def _table(board: Leaderboard) -> str:
    names = ["model", "mean rank", *board.datasets, *(name for name, _ in COSTS.values())]
    head = "".join(f'<th scope="col">{escape(name)}</th>' for name in names)
    numbered = _numbered(board)
    rows = "".join(_row(board, entrant, n if numbered else None) for n, entrant in enumerate(board.entrants, start=1))
    return f'<div class="scroll" tabindex="0"><table><thead><tr>{head}</tr></thead><tbody>{rows}</tbody></table></div>'


def _numbered(board: Leaderboard) -> bool:
    """Whether names are too long for the plots, so that numbers stand for them."""
    return any(len(entrant.name) > LONGEST for entrant in board.entrants)


def _row(board: Leaderboard, entrant: Entrant, number_in_plots: int | None) -> str:
    before = f'<span class="number">{number_in_plots}</span>' if number_in_plots is not None else ""
    cells = [f'<th scope="row">{before}{_name(entrant)}</th>', _rank(board, entrant)]
    share = is_share(board)
    for dataset in board.datasets:
        score = entrant.scores.get(dataset)
        if score is None:
            cells.append('<td class="gap">–</td>')
            continue
        kind = {BEST: "best", TIED: "tied"}.get(score.mark, "")
        spread = f' <span class="spread">± {number(score.spread, share)}</span>' if score.spread is not None else ""
        p = f"p = {score.p:.2g}" if score.p is not None else score.mark if score.mark != WORSE else ""
        cells.append(
            f'<td class="{kind}" title="{escape(p, quote=True)}">{number(score.mean, share)}{spread} '
            f'<span class="seeds">({score.n})</span> <span class="mark">{MARKS.get(score.mark, "")}</span></td>'
        )
    cells += [f"<td>{escape(over_datasets(entrant, of))}</td>" for _, of in COSTS.values()]
    return f"<tr>{''.join(cells)}</tr>"


def _name(entrant: Entrant) -> str:
    """The model, and below it the options that make it an entrant of its own; a line may end between two of them."""
    options = [f"{key}={inline(value)}" for key, value in entrant.options.items()]
    listed = " ".join(f'<span class="option">{escape(option)}</span>' for option in options)
    return escape(entrant.model).replace("_", "_<wbr>") + (f' <span class="options">{listed}</span>' if listed else "")


def _rank(board: Leaderboard, entrant: Entrant) -> str:
    """The mean rank with a bar: the longer, the better."""
    if entrant.mean_rank is None:
        return '<td class="gap">–</td>'
    most = len(board.entrants)
    share = 100.0 if most == 1 else 100 * (most - entrant.mean_rank + 0.5) / (most - 0.5)
    bar = f'<span><i style="width:{share:.0f}%"></i></span>'
    return f'<td class="rank"><div>{bar}{rank(entrant.mean_rank)}</div></td>'


def _plots(board: Leaderboard, dataset: str) -> str:
    share = is_share(board)
    y_name = f"{board.split} {board.metric}" + (" in %" if share else "")
    numbered = _numbered(board)
    figures = []
    for cost in _PLOTTED:
        x_name, of = COSTS[cost]
        points = [
            Point(entrant.name, float(x), score.mean, score.spread, number)
            for number, entrant in enumerate(board.entrants)
            if (score := entrant.scores.get(dataset)) is not None and (x := of(score)) is not None
        ]
        scale = 100.0 if share else 1.0
        drawn = scatter(points, x_name, y_name, scale, numbered=numbered, most=scale if share else math.inf)
        if drawn:
            figures.append(f"<figure><h3>{escape(board.metric)} against {escape(x_name)}</h3>{drawn}</figure>")
    if not figures:
        return ""
    legend = _legend(board, dataset) if numbered else ""
    return f'<h2>{escape(dataset)}</h2>{legend}<div class="plots">{"".join(figures)}</div>'


def _legend(board: Leaderboard, dataset: str) -> str:
    rows = [
        f'<li value="{number}" class="c{(number - 1) % COLOURS}">{escape(entrant.name)}</li>'
        for number, entrant in enumerate(board.entrants, start=1)
        if dataset in entrant.scores
    ]
    return f"<details><summary>The numbers are those of the table.</summary><ol>{''.join(rows)}</ol></details>"
