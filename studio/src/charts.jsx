// Pictures: SVG lines and points, canvas heat maps. Each has a text that says what it shows.
import { useEffect, useMemo, useRef, useState } from "preact/hooks";
import { ends, number } from "./format.js";
import { Breakable } from "./ui.jsx";

export const SERIES = ["var(--s0)", "var(--s1)", "var(--s2)", "var(--s3)", "var(--s4)", "var(--s5)"];
const H = 250, L = 64, R = 12, T = 24, B = 34;

/** The width of a drawing, that of its place, so that letters have one size everywhere; and the place. */
function useWidth(most = 860) {
  const place = useRef();
  const [width, set] = useState(640);
  useEffect(() => {
    const watcher = new ResizeObserver(([entry]) => set(Math.max(280, Math.min(most, Math.floor(entry.contentRect.width)))));
    watcher.observe(place.current);
    return () => watcher.disconnect();
  }, []);
  return [width, place];
}
const ticks = (low, high, want = 5, whole = false) => {
  if (!(high > low)) return [low];
  const raw = Math.max(whole ? 1 : 0, (high - low) / want), power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((m) => m * power).find((s) => s >= raw);
  const found = [];
  for (let x = Math.ceil(low / step) * step; x <= high + step * 1e-9; x += step) found.push(Math.abs(x) < step * 1e-9 ? 0 : x);
  return found;
};
/** Powers of ten, with their doubles and fives where these are few, between two logarithms. */
const decades = (low, high) => {
  const powers = Array.from({ length: Math.ceil(high) - Math.floor(low) + 1 }, (_, i) => 10 ** (Math.floor(low) + i));
  const all = high - low > 2 ? powers : powers.flatMap((p) => [p, 2 * p, 5 * p]);
  return all.filter((v) => Math.log10(v) >= low && Math.log10(v) <= high);
};
/** The labels of ticks, with equally many decimals, and without those that are zero in all of them. */
const labelled = (values, format) => {
  const most = (texts) => Math.max(0, ...texts.map((t) => t.match(/\.(\d+)/)?.[1].length ?? 0));
  let texts = values.map(format);
  texts = texts.map((t, i) => (/^-?\d+(\.\d+)?$/.test(t) ? values[i].toFixed(most(texts)) : t));
  while (texts.length && texts.every((t) => /\.\d*0(?!\d)/.test(t))) texts = texts.map((t) => t.replace(/(\.\d*?)0(?!\d)/, "$1").replace(/\.(?!\d)/, ""));
  return texts;
};
const extent = (values, pad = 0.04) => {
  const sound = values.filter((v) => v != null && Number.isFinite(v));
  if (!sound.length) return [0, 1];
  let low = Math.min(...sound), high = Math.max(...sound);
  if (low === high) { low -= Math.abs(low) * 0.1 || 0.5; high += Math.abs(high) * 0.1 || 0.5; }
  const room = (high - low) * pad;
  return [low - room, high + room];
};

/** Lines and points: `series` of `{name, x, y, dots, line, dashed}`; `mark` draws an upright line, `log` is about y. */
export function Chart({ series: given, x = "", y = "", title, mark, log = false, format = (v) => number(v, 4) }) {
  const [W, place] = useWidth();
  const [near, set] = useState(null);
  const series = log ? given.map((s) => ({ ...s, y: s.y.map((v) => (v > 0 ? v : null)) })) : given;
  const shown = series.filter((s) => s.y.length);
  const [x0, x1] = extent(shown.flatMap((s) => s.x), 0), up = (v) => (log ? Math.log10(v) : v);
  const [y0, y1] = extent(shown.flatMap((s) => s.y.map((v) => (v == null ? v : up(v)))));
  const px = (v) => L + ((v - x0) / (x1 - x0)) * (W - L - R), py = (v) => H - B - ((up(v) - y0) / (y1 - y0)) * (H - T - B);
  const points = shown.flatMap((s, i) => s.x.map((v, j) => ({ s, i, x: v, y: s.y[j], label: s.labels?.[j] })).filter((p) => p.y != null));
  const move = (event) => {
    const box = event.currentTarget.getBoundingClientRect();
    const [mx, my] = [((event.clientX - box.left) / box.width) * W, ((event.clientY - box.top) / box.height) * H];
    let best = null, least = 900;
    for (const p of points) { const d = (px(p.x) - mx) ** 2 + (py(p.y) - my) ** 2; if (d < least) [best, least] = [p, d]; }
    set(best);
  };
  const heights = log ? decades(y0, y1) : ticks(y0, y1, 6), texts = labelled(heights, format);
  const across = ticks(x0, x1, W < 500 ? 4 : 7, shown.every((s) => s.x.every(Number.isInteger))), below = labelled(across, (v) => number(v, 4));
  const color = (s, i) => s.color ?? SERIES[i % SERIES.length];
  return (
    <figure class="chart" ref={place}>
      <svg viewBox={`0 0 ${W} ${H}`} role="img" aria-label={`${title}. ${shown.map((s) => `${s.name}: ${s.y.length} points`).join("; ")}`} onMouseMove={move} onMouseLeave={() => set(null)}>
        {heights.map((v, i) => <g key={v}><line class="grid" x1={L} x2={W - R} y1={py(v)} y2={py(v)} /><text x={L - 8} y={py(v) + 4} text-anchor="end">{texts[i]}</text></g>)}
        <text x={0} y={11} class="axis">{y}</text>
        {across.map((v, i) => <text key={v} x={px(v)} y={H - B + 16} text-anchor="middle">{below[i]}</text>)}
        <text x={(L + W - R) / 2} y={H - 3} text-anchor="middle" class="axis">{x}</text>
        {mark != null && <line class="mark" x1={px(mark)} x2={px(mark)} y1={T} y2={H - B} />}
        {shown.map((s, i) => (
          <g key={s.name} style={{ color: color(s, i) }}>
            {s.line !== false && <polyline points={s.x.map((v, j) => (s.y[j] == null ? "" : `${px(v)},${py(s.y[j])}`)).join(" ")} class={s.dashed ? "line dashed" : "line"} />}
            {s.dots !== false && s.x.map((v, j) => s.y[j] != null && <circle key={j} cx={px(v)} cy={py(s.y[j])} r={s.size ?? 3} class={s.faint ? "faint" : ""} />)}
          </g>))}
        {near && <circle cx={px(near.x)} cy={py(near.y)} r="6" class="near" />}
      </svg>
      <figcaption>
        {shown.length > 1 ? shown.map((s, i) => <span key={s.name} class="legend"><i class="swatch" style={{ background: color(s, i) }} />{s.name}</span>) : null}
        <span class="told">{near ? `${near.label ?? near.s.name}: ${number(near.x, 4)} → ${format(near.y)}` : ""}</span>
      </figcaption>
    </figure>
  );
}

const ramp = (t, dark) => {
  const stops = dark ? [[23, 31, 29], [20, 80, 72], [66, 176, 152], [244, 225, 140]] : [[246, 248, 247], [176, 219, 208], [38, 135, 118], [8, 52, 60]];
  const at = Math.max(0, Math.min(0.9999, t)) * (stops.length - 1), i = Math.floor(at), f = at - i;
  return `rgb(${stops[i].map((c, k) => Math.round(c + (stops[i + 1][k] - c) * f)).join(",")})`;
};
/** Whether letters on a colour of the ramp must be those of the other end. */
const contrasts = (t, dark) => (dark ? t > 0.55 : t > 0.45);
const isDark = () => getComputedStyle(document.documentElement).getPropertyValue("--dark").trim() === "1";

/** A matrix in colour. Arrow keys walk over it, Enter or a click picks a cell. `values[row][column]` may be null; `marks`
 * are letters on cells, `[row, column, letter]`. */
export function HeatMap({ values, rows, columns, title, low, high, onPick, format = (v) => number(v, 3), cell = 14, labels = true, square = false, log = false, marks = [] }) {
  const [room, place] = useWidth(1100);
  const canvas = useRef();
  const [at, set] = useState(null);
  const flat = values.flat().filter((v) => v != null && Number.isFinite(v));
  const least = low ?? Math.min(...flat, 0), most = high ?? Math.max(...flat, 1e-12);
  const wide = columns.length, tall = rows.length, beside = labels ? 16 + 6.4 * Math.max(0, ...rows.map((r) => r.length)) : 4;
  const [w, h] = useMemo(() => square ? Array(2).fill(Math.max(2, Math.min(cell, Math.floor((room - beside) / wide)))) : [Math.max(4, Math.min(wide <= 4 ? 180 : 112, Math.floor((room - beside) / wide))), Math.max(3, Math.min(tall <= 24 ? Math.max(cell, 20) : cell, Math.floor(460 / tall)))], [wide, tall, cell, square, room, beside]);
  const [theme, setTheme] = useState(isDark());
  useEffect(() => {
    const change = () => setTheme(isDark());
    const system = matchMedia("(prefers-color-scheme: dark)");
    addEventListener("theme", change);
    system.addEventListener("change", change);
    return () => { removeEventListener("theme", change); system.removeEventListener("change", change); };
  }, []);
  useEffect(() => {
    const scale = devicePixelRatio || 1, c = canvas.current;
    [c.width, c.height] = [wide * w * scale, tall * h * scale];
    const pen = c.getContext("2d");
    pen.scale(scale, scale);
    Object.assign(pen, { font: "11px system-ui, sans-serif", textAlign: "center", textBaseline: "middle" });
    values.forEach((row, i) => row.forEach((v, j) => {
      if (v == null) return;
      const [a, b, c] = log ? [v, least, most].map((x) => Math.log(Math.max(x, 1e-12))) : [v, least, most];
      const t = (a - b) / (c - b || 1);
      pen.fillStyle = ramp(t, theme);
      pen.fillRect(j * w, i * h, w - (w > 6 ? 1 : 0), h - (h > 6 ? 1 : 0));
      if (h < 18 || w < 30) return;
      const text = format(v);
      if (pen.measureText(text).width > w - 8) return;
      pen.fillStyle = ramp(contrasts(t, theme) ? 0 : 1, theme);
      pen.fillText(text, (j + 0.5) * w, (i + 0.5) * h);
    }));
  }, [values, w, h, least, most, theme]);
  const find = (event) => {
    const box = canvas.current.getBoundingClientRect();
    const j = Math.floor(((event.clientX - box.left) / box.width) * wide), i = Math.floor(((event.clientY - box.top) / box.height) * tall);
    return values[i]?.[j] !== undefined ? [i, j] : null;
  };
  const walk = (event) => {
    const step = { ArrowUp: [-1, 0], ArrowDown: [1, 0], ArrowLeft: [0, -1], ArrowRight: [0, 1] }[event.key];
    if (step) {
      event.preventDefault();
      const [i, j] = at ?? [0, 0];
      set([Math.max(0, Math.min(tall - 1, i + step[0])), Math.max(0, Math.min(wide - 1, j + step[1]))]);
    } else if (event.key === "Enter" && at) onPick?.(...at);
  };
  const told = at && `${rows[at[0]]} · ${columns[at[1]]}: ${values[at[0]]?.[at[1]] == null ? "none" : format(values[at[0]][at[1]])}`;
  return (
    <figure class="chart heat" ref={place}>
      <div class="scroll">
        <div class="heat-grid" style={{ gridTemplateColumns: `max-content ${wide * w}px` }}>
          {labels && <div class="heat-rows" style={{ lineHeight: `${h}px` }}>{rows.map((r, i) => <span key={r} style={{ height: `${h}px` }}>{h >= 12 || i % Math.ceil(13 / h) === 0 ? r : ""}</span>)}</div>}
          <div class="heat-frame">
            <canvas ref={canvas} tabindex="0" role="img" aria-label={`${title}. ${tall} rows, ${wide} columns${told ? `. ${told}` : ""}`} style={{ width: `${wide * w}px`, height: `${tall * h}px`, cursor: onPick ? "pointer" : "default" }}
              onMouseMove={(e) => set(find(e))} onMouseLeave={() => set(null)} onClick={(e) => { const f = find(e); if (f) onPick?.(...f); }} onKeyDown={walk} />
            {marks.map(([i, j, letter]) => <b key={letter} class="heat-mark" aria-hidden="true" style={{ left: `${j * w + Math.min(w / 2, 9)}px`, top: `${i * h + Math.min(h / 2, 9)}px` }}>{letter}</b>)}
            {at && <i class="heat-cell" style={{ left: `${at[1] * w}px`, top: `${at[0] * h}px`, width: `${w}px`, height: `${h}px` }} />}
          </div>
          {labels && <><span /><div class={`heat-columns ${columns.every((c) => c.split(/(?<=[._\s])/).every((part) => 6.6 * part.length <= w)) ? "flat" : ""}`} style={{ gridTemplateColumns: `repeat(${wide}, ${w}px)` }}>{columns.map((c) => <span key={c} title={c}><Breakable text={c} /></span>)}</div></>}
        </div>
      </div>
      <figcaption>
        {flat.length > 0 && <span class="legend"><i class="ramp" aria-hidden="true" />{format(least)} – {format(most)}</span>}
        <span class="muted">{title}</span>
        <span class="told" aria-live="polite">{told}</span>
      </figcaption>
    </figure>
  );
}

/** A name that keeps its end, where names of one kind differ. */
const shorten = (text, most) => (text.length > most ? `…${text.slice(1 - most)}` : text);

/** Parallel coordinates, one line a trial, coloured by its score. */
export function Parallel({ names, rows, scores, title }) {
  const [W, place] = useWidth();
  const order = scores.map((s, i) => [s, i]).sort((a, b) => a[0] - b[0]);
  const axes = names.map((n, k) => {
    const values = rows.map((r) => r[k]);
    const words = values.some((v) => typeof v !== "number") ? [...new Set(values.map(String))] : null;
    const [low, high] = words ? [0, Math.max(1, words.length - 1)] : extent(values, 0);
    return { at: (v) => 1 - ((words ? words.indexOf(String(v)) : v) - low) / (high - low), low: words ? words[0] : number(low), high: words ? words.at(-1) : number(high) };
  });
  const px = (k) => 60 + (names.length === 1 ? (W - 120) / 2 : (k / (names.length - 1)) * (W - 120)), py = (t) => 26 + t * 170;
  const least = Math.min(...scores), span = Math.max(...scores) - least || 1;
  return (
    <figure class="chart" ref={place}>
      <svg viewBox={`0 0 ${W} 232`} role="img" aria-label={title}>
        {order.map(([s, i]) => <polyline key={i} class="thin" style={{ stroke: `color-mix(in oklab, var(--s0) ${Math.round(100 * (s - least) / span)}%, var(--line))`, strokeWidth: s === least + span ? 3 : 1.2 }} points={names.map((_, k) => `${px(k)},${py(axes[k].at(rows[i][k]))}`).join(" ")} />)}
        {ends(names).map((n, k) => <g key={n}><line class="grid" x1={px(k)} x2={px(k)} y1={26} y2={196} /><text x={px(k)} y={16} text-anchor="middle">{axes[k].high}</text><text x={px(k)} y={212} text-anchor="middle">{axes[k].low}</text><text x={px(k)} y={228} text-anchor="middle" class="axis">{shorten(n, Math.max(6, Math.floor(W / names.length / 8)))}</text></g>)}
      </svg>
      <figcaption><span class="muted">{title}</span></figcaption>
    </figure>
  );
}
