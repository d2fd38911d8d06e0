// Files of questions: what to ask, how a model did, and whether one does better than another.
import { useEffect, useState } from "preact/hooks";
import { post, useKept } from "./api.js";
import { Failure, Interval, Note, Select, Slider, useItems } from "./ui.jsx";
import { number } from "./format.js";

const SOME = { path: "", limit: 32 };
/** What is asked, as the server wants it: undefined for nothing. */
export const useQuestions = () => {
  const [chosen, set] = useKept("questions", SOME);
  return [chosen.path ? chosen : undefined, chosen, set];
};

export function Asking({ chosen, set }) {
  const files = useItems("questions");
  return (
    <div class="row">
      <Select label="Questions" value={chosen.path} empty="None" options={files.map((f) => [f.path, `${f.path} (${f.facts.kind})`])} onInput={(path) => set({ ...chosen, path })}
        help={files.length ? "Asked of every model." : "Put a .jsonl file of questions into the folder: question, options, answer; question, answer; or text."} />
      {chosen.path && <Slider label="How many, at most" min={8} max={256} step={8} value={chosen.limit} onInput={(v) => set({ ...chosen, limit: Math.max(1, Math.min(10000, Math.round(v))) })} />}
    </div>
  );
}

/** A score event as an interval; losses, which have no upper end, around themselves. */
export function Scored({ score, label = "Score" }) {
  if (!score) return null;
  const open = score.lower_is_better;
  return <Interval label={`${label}${open ? " (nats a token, lower is better)" : ""}, ${score.count} of ${score.total} items`} {...score} scale={open ? [score.low - (score.high - score.low), score.high + (score.high - score.low)] : [0, 1]} />;
}

/** Whether the first is better than the second, from their answers to the same questions. */
export function Verdict({ left, right, names }) {
  const [found, set] = useState(), [error, fail] = useState();
  const same = left && right && left.mark === right.mark;
  const n = same ? Math.min(left.count, right.count) : 0;
  useEffect(() => {
    if (!n) return set();
    let alive = true;
    post("/api/verdict", { left: left.answers.slice(0, n), right: right.answers.slice(0, n), lower_is_better: left.lower_is_better }).then((v) => alive && (fail(), set(v)), (e) => alive && fail(e));
    return () => { alive = false; };
  }, [n, left, right]);
  if (error) return <Failure error={error} />;
  if (!found || !n) return null;
  const told = { better: `${names[0]} is better than ${names[1]}`, worse: `${names[0]} is worse than ${names[1]}`, "cannot tell": `Cannot tell ${names[0]} from ${names[1]} with ${found.count} items` }[found.verdict];
  const sentence = told[0].toUpperCase() + told.slice(1);
  return <Note kind={{ better: "good", worse: "warn" }[found.verdict] ?? ""}>{sentence}: item by item the difference is {signed(found.value)}, 95 % interval {signed(found.low)} to {signed(found.high)}.</Note>;
}
const signed = (x) => (x == null ? "–" : `${x > 0 ? "+" : x < 0 ? "−" : ""}${number(Math.abs(x))}`);
