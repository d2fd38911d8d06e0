// Small parts that every screen is made of.
import { Fragment } from "preact";
import { useEffect, useId, useMemo, useRef, useState } from "preact/hooks";
import { get } from "./api.js";
import { score } from "./format.js";

export const Card = ({ title, actions, children, class: given = "", ...rest }) => (
  <section class={`card ${given}`} {...rest}>
    {title && <header class="card-head"><h2>{title}</h2>{actions && <div class="row">{actions}</div>}</header>}
    {children}
  </section>
);
export const Failure = ({ error }) => error ? <p class="notice bad" role="alert">{error.message ?? String(error)}</p> : null;
export const Note = ({ kind = "", children }) => <p class={`notice ${kind}`}>{children}</p>;
export const Busy = ({ children = "Loading…" }) => <p class="busy" role="status"><span class="dot" aria-hidden="true" />{children}</p>;
export const Badge = ({ kind = "", children }) => <span class={`badge ${kind}`}>{children}</span>;
export const Button = ({ kind = "", ...rest }) => <button type="button" class={`button ${kind}`} {...rest} />;

/** A name that may be broken after its dots and underscores, and is copied as it is. */
export const Breakable = ({ text }) => text.split(/(?<=[._])/).map((part, i) => <Fragment key={i}>{i > 0 && <wbr />}{part}</Fragment>);
/** A text with `code` in it. */
export const Prose = ({ text }) => text.split("`").map((part, i) => (i % 2 ? <code key={i}>{part}</code> : part));

export function Field({ label, help, children }) {
  const id = useId();
  return (
    <div class="field">
      <label for={id}>{label}</label>
      {typeof children === "function" ? children(id) : children}
      {help && <small class="muted"><Prose text={help} /></small>}
    </div>
  );
}
export const TextField = ({ label, help, value, onInput, ...rest }) => (
  <Field label={label} help={help}>
    {(id) => <input id={id} type="text" value={value} onInput={(e) => onInput(e.currentTarget.value)} spellcheck={false} {...rest} />}
  </Field>
);
export const Select = ({ label, help, value, options, onInput, empty }) => (
  <Field label={label} help={help}>
    {(id) => (
      <select id={id} value={value ?? ""} onChange={(e) => onInput(e.currentTarget.value)}>
        {empty !== undefined && <option value="">{empty}</option>}
        {options.map((o) => {
          const [key, text] = Array.isArray(o) ? o : [o, o];
          return <option key={key} value={key}>{text}</option>;
        })}
      </select>
    )}
  </Field>
);
export const Check = ({ label, checked, onInput, ...rest }) => (
  <label class="check"><input type="checkbox" checked={checked} onChange={(e) => onInput(e.currentTarget.checked)} {...rest} />{label}</label>
);

/** A range with its number beside it; the number may go beyond the range. */
export function Slider({ label, value, onInput, min = 0, max = 1, step = 0.01, help, color, bare }) {
  const id = useId();
  const set = (text) => { const x = Number(text); if (text !== "" && Number.isFinite(x)) onInput(x); };
  return (
    <div class="slider" title={help}>
      <label for={id}>{color && <i class="swatch" style={{ background: color }} aria-hidden="true" />}{label}</label>
      <input id={id} type="range" min={min} max={max} step={step} value={value} onInput={(e) => set(e.currentTarget.value)} />
      {!bare && <input type="number" aria-label={`${label}, number`} step={step} value={value} onInput={(e) => set(e.currentTarget.value)} />}
    </div>
  );
}

let asked;
/** What is in the folder, asked for once, and again by `refreshHome`. */
export const refreshHome = () => (asked = get("/api/home"));
export const home = () => (asked ?? refreshHome()).catch((error) => { asked = undefined; throw error; });
/** Whether two items may be fine-tunes of one base, as far as configs and headers tell. */
export const alike = (a, b) => a?.kind === "adapter" || b?.kind === "adapter" || ["architecture", "parameters", "layers"].every((k) => a?.facts[k] == null || b?.facts[k] == null || a.facts[k] === b.facts[k]);
/** The base and its fine-tunes in the folder, as far as the weights tell. */
export const family = () => get("/api/family");
/** What is in the folder, of some kinds, by name. */
export function useItems(...kinds) {
  const [items, set] = useState([]);
  useEffect(() => {
    let alive = true;
    home().then((found) => alive && set(found.items), () => {});
    return () => { alive = false; };
  }, []);
  return useMemo(() => items.filter((item) => !kinds.length || kinds.includes(item.kind)).sort((a, b) => a.path.localeCompare(b.path, "en", { numeric: true })), [items]);
}

export function Table({ columns, rows, caption }) {
  const [order, set] = useState(null);
  const sorted = order
    ? [...rows].sort((a, b) => {
        const [x, y] = [a[order.by], b[order.by]].map((c) => (c?.sort !== undefined ? c.sort : c?.props ? c.props.children : c));
        return (x > y ? 1 : x < y ? -1 : 0) * order.sign;
      })
    : rows;
  return (
    <div class="scroll" tabindex="0" role="region" aria-label={caption}>
      <table>
        <caption class="hidden">{caption}</caption>
        <thead><tr>{columns.map((c, i) => (
          <th key={c} class={typeof (rows[0]?.[i]?.sort ?? rows[0]?.[i]) === "number" ? "num" : ""} aria-sort={order?.by === i ? (order.sign > 0 ? "ascending" : "descending") : undefined}>
            <button type="button" onClick={() => set({ by: i, sign: order?.by === i ? -order.sign : 1 })}>{c}</button>
          </th>))}</tr></thead>
        <tbody>{sorted.map((row, i) => <tr key={i}>{row.map((cell, j) => <td key={j} class={typeof (cell?.sort ?? cell) === "number" ? "num" : !j && String(cell).length > 16 ? "name" : ""}>{cell?.sort !== undefined ? cell.show : !j && typeof cell === "string" ? <Breakable text={cell} /> : cell}</td>)}</tr>)}</tbody>
      </table>
    </div>
  );
}
/** A cell that sorts by a number and shows a text. */
export const cell = (sort, show) => ({ sort, show });

export const Progress = ({ job }) => {
  const p = job.progress;
  const share = p?.total ? p.done / p.total : null;
  return (
    <div class="progress" role="progressbar" aria-label={job.title} aria-valuemin={0} aria-valuemax={100} aria-valuenow={share == null ? undefined : Math.round(100 * share)}>
      <i class={share == null ? "unknown" : ""} style={{ width: share == null ? "30%" : `${100 * share}%` }} />
    </div>
  );
};
/** A score with its 95 % interval, between 0 and 1 unless `scale` says otherwise. */
export const Interval = ({ label, value, low, high, scale: [from, to] = [0, 1] }) => {
  const at = (v) => 100 * Math.min(1, Math.max(0, ((v ?? from) - from) / (to - from || 1)));
  return (
    <div class="interval"><span>{label}</span><span class="track" aria-hidden="true"><i style={{ left: `${at(low)}%`, width: `${at(high) - at(low)}%` }} /><b style={{ left: `${at(value)}%` }} /></span><span class="num">{score(value)}{low != null && ` (${score(low)} to ${score(high)})`}</span></div>
  );
};
export const STATUS = { done: "good", running: "info", starting: "info", failed: "bad", cancelled: "warn", interrupted: "warn" };
/** Items whose path has a text in it, and the field to type it into, which short lists do not need. */
export function useFilter(items, label = "Filter by name") {
  const [text, write] = useState("");
  const found = items.filter((item) => item.path.toLowerCase().includes(text.toLowerCase()));
  return [found, items.length > 16 && <input type="text" class="filter" aria-label={label} placeholder={label} value={text} onInput={(e) => write(e.currentTarget.value)} spellcheck={false} />];
}
export function Picker({ label, chosen, onInput, items, most = 8 }) {
  const [found, filter] = useFilter(items, `Filter ${label.toLowerCase()} by name`);
  return (
    <fieldset class="picker">
      <legend>{label}{filter && chosen.length > 0 && `, ${chosen.length} chosen`}</legend>
      {filter}
      {found.map((item) => (
        <Check key={item.path} label={item.path} checked={chosen.includes(item.path)} disabled={!chosen.includes(item.path) && chosen.length >= most}
          onInput={(on) => onInput(on ? [...chosen, item.path] : chosen.filter((p) => p !== item.path))} />))}
      {!found.length && <p class="muted">{items.length ? "None with this name." : "None in this folder."}</p>}
    </fieldset>
  );
}
/** A base and its experts: the family of the folder until the user chooses, which a late answer does not replace. */
export function useFamily(most) {
  const [chosen, set] = useState({ base: "", experts: [] }), touched = useRef(false);
  useEffect(() => { family().then(({ base, models }) => base && !touched.current && set({ base, experts: models.slice(0, most) }), () => {}); }, []);
  return [chosen, (values) => { touched.current = true; set(values); }];
}
export function FamilyPicker({ items, chosen: { base, experts }, onInput, most }) {
  const at = (path) => items.find((item) => item.path === path);
  return (
    <>
      <Select label="Base" value={base} empty="Choose…" options={items.map((item) => item.path)} onInput={(p) => onInput({ base: p, experts: experts.filter((e) => e !== p && alike(at(e), at(p))) })} />
      <Picker label="Experts" items={items.filter((item) => item.path !== base && alike(item, at(base)))} chosen={experts} onInput={(e) => onInput({ base, experts: e })} most={most} />
    </>
  );
}
