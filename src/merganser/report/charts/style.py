"""Colours and layout of charts, for light and dark pages."""

from __future__ import annotations

#: Categorical colours, at least 3:1 against the page in light and in dark.
COLOURS = 8

STYLE = """
:root { --c0: #1f6fc4; --c1: #b3541e; --c2: #2b7d46; --c3: #8e44ad; --c4: #b3261e; --c5: #5d6b75; --c6: #8a6d00;
  --c7: #0d7c72; --hot: #b3261e; --cold: #1f6fc4; --mark: #8886; }
@media (prefers-color-scheme: dark) { :root { --c0: #6ab0f3; --c1: #f0a06a; --c2: #6cc58a; --c3: #c99be0;
  --c4: #f28b82; --c5: #a9b4bd; --c6: #d9bb4a; --c7: #5ccabd; --hot: #f28b82; --cold: #6ab0f3; } }
.chart { margin: 1rem 0; }
.chart figcaption { font-size: .85rem; color: var(--soft); }
.chart .legend { display: flex; flex-wrap: wrap; gap: .1rem 1rem; font-size: .85rem; padding: 0; margin: 0 0 .3rem; }
.chart .legend li { list-style: none; }
.chart .legend li::before { content: ""; display: inline-block; width: .7rem; height: .7rem; margin-right: .35rem;
  border-radius: 50%; background: var(--own); }
.plot { display: grid; grid-template-columns: auto 1fr; font-size: .8rem; font-variant-numeric: tabular-nums; }
.plot .ys { position: relative; text-align: right; padding-right: .4rem; }
.plot .ys span { position: absolute; right: .4rem; transform: translateY(-50%); white-space: nowrap; }
.plot .ys i { visibility: hidden; font-style: normal; display: block; height: 0; white-space: nowrap; }
.plot .xs { position: relative; height: 1.3rem; grid-column: 2; margin: 0 .5rem; }
.plot .xs span { position: absolute; transform: translateX(-50%); white-space: nowrap; }
.plot .upright { height: auto; } .plot .upright i { visibility: hidden; }
.plot .upright i, .plot .upright span { writing-mode: vertical-rl; font-style: normal; white-space: nowrap; }
.plot .upright span { top: .3rem; }
@media (min-width: 45rem) { .plot .narrow { height: 1.3rem; } .plot .narrow i { display: none; }
  .plot .narrow span { writing-mode: horizontal-tb; top: 0; } }
.ramp { display: flex; gap: .4rem; align-items: center; font-size: .8rem; font-variant-numeric: tabular-nums; }
.ramp i { width: 7rem; height: .7rem; border: 1px solid var(--line);
  background: linear-gradient(90deg, transparent, var(--hot)); }
.ramp.signed i { background: linear-gradient(90deg, var(--cold), transparent, var(--hot)); }
.plot .names { grid-column: 2; display: grid; grid-auto-flow: column; grid-auto-columns: 1fr; margin: 0 .5rem;
  text-align: center; overflow-wrap: anywhere; }
.plot .x, .plot .y { color: var(--soft); }
.plot .x { grid-column: 2; text-align: center; }
.plot .y { grid-column: 1 / 3; padding-bottom: .4rem; }
.plot .area { position: relative; margin: 0 .5rem; }
.plot .area span { position: absolute; transform: translate(.3rem, -50%); white-space: nowrap; background: Canvas;
  padding: 0 .15rem; line-height: 1.2; }
.plot svg { width: 100%; height: 100%; display: block; overflow: visible; }
.plot svg * { vector-effect: non-scaling-stroke; }
.grid { stroke: var(--line); stroke-width: 1; }
.guide { stroke: currentColor; stroke-width: 1; stroke-dasharray: 4 4; opacity: .6; }
.line { fill: none; stroke: var(--own); stroke-width: 2; }
.dotted { stroke-dasharray: 2 5; }
.dot { stroke: var(--own); stroke-width: 9; stroke-linecap: round; }
.point { stroke: currentColor; stroke-width: 10; stroke-linecap: round; }
.faint { opacity: .35; }
.range { stroke: var(--own); stroke-width: 2; }
"""


def own(index: int) -> str:
    """Return the style attribute that gives a mark the colour of a series."""
    return f'style="--own:var(--c{index % COLOURS})"'
