// Talks to the server: the token comes with the address once and is kept for this tab.
import { useCallback, useEffect, useRef, useState } from "preact/hooks";

const KEY = "merganser-token";
const given = location.hash.match(/token=([\w-]+)/);
if (given) {
  sessionStorage.setItem(KEY, given[1]);
  history.replaceState(null, "", location.pathname);
}

const request = async (method, path, body, signal) => {
  const headers = { authorization: `Bearer ${sessionStorage.getItem(KEY) ?? ""}` };
  if (body !== undefined) headers["content-type"] = "application/json";
  let response;
  try {
    response = await fetch(path, { method, headers, signal, body: body === undefined ? undefined : JSON.stringify(body) });
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Error("The studio does not answer. Start it again with `merganser studio`; jobs go on meanwhile.");
  }
  if (response.ok) return response;
  const found = await response.json().catch(() => ({}));
  throw Object.assign(new Error(found.error ?? `${response.status} ${response.statusText}`), { status: response.status });
};

export const query = (path, values) => `${path}?${new URLSearchParams(values)}`;
export const get = async (path) => (await request("GET", path)).json();
export const post = async (path, body) => (await request("POST", path, body)).json();
export const remove = async (path) => (await request("DELETE", path)).json();

/** Reads server-sent events; `body` makes it a POST. An event `error` is thrown. */
export async function stream(path, body, onEvent, signal) {
  const response = await request(body === undefined ? "GET" : "POST", path, body, signal);
  const reader = response.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = "";
  for (;;) {
    const { value, done } = await reader.read();
    if (done) return;
    const blocks = (rest + value).split("\n\n");
    rest = blocks.pop();
    for (const block of blocks) {
      const event = JSON.parse(block.slice(6));
      if (event.event === "error") throw new Error(event.message);
      onEvent(event);
    }
  }
}

/** What a path answers: `{data, error, loading, reload}`; nothing is asked for an empty path. */
export function useGet(path) {
  const [state, set] = useState({ loading: !!path });
  const latest = useRef();
  const reload = useCallback(async () => {
    latest.current = path;
    if (!path) return set({});
    set((before) => ({ data: before.path === path ? before.data : undefined, loading: true, path }));
    try {
      const data = await get(path);
      if (latest.current === path) set({ data, path });
    } catch (error) {
      if (latest.current === path) set({ error, path });
    }
  }, [path]);
  useEffect(() => void reload(), [reload]);
  return { ...state, reload };
}

/** A stream that is started by hand: `start(body)` ends the one before. */
export function useStream(path, onEvent) {
  const [state, set] = useState({ running: false });
  const current = useRef(null);
  const handler = useRef(onEvent);
  handler.current = onEvent;
  const stop = useCallback(() => current.current?.abort(), []);
  const start = useCallback(async (body, address = path) => {
    current.current?.abort();
    const mine = (current.current = new AbortController());
    set({ running: true });
    try {
      await stream(address, body, (event) => current.current === mine && handler.current(event), mine.signal);
      if (current.current === mine) set({ running: false });
    } catch (error) {
      if (current.current === mine) set({ running: false, error: error.name === "AbortError" ? undefined : error });
    }
  }, [path]);
  useEffect(() => stop, [stop]);
  return { ...state, start, stop };
}

/** Follows a stream for as long as the screen is open, and finds it again after a restart of the server. */
export function useWatch(path) {
  const [state, set] = useState({});
  useEffect(() => {
    if (!path) return undefined;
    const ended = new AbortController();
    (async () => {
      while (!ended.signal.aborted) {
        try {
          await stream(path, undefined, (data) => set({ data }), ended.signal);
        } catch (error) {
          if (error.name === "AbortError") return;
          set((before) => ({ ...before, error }));
          if (error.status && error.status < 500) return;
        }
        await new Promise((resolve) => setTimeout(resolve, 1500));
      }
    })();
    return () => ended.abort();
  }, [path]);
  return state;
}

/** The screen and its values from the address after `#/`, and a way to go elsewhere. */
export const parseRoute = () => {
  const [screen, search = ""] = location.hash.replace(/^#\/?/, "").split("?");
  return { screen: screen || "home", values: Object.fromEntries(new URLSearchParams(search)) };
};
export const link = (screen, values = {}) => {
  const search = new URLSearchParams(values).toString();
  return `#/${screen}${search ? `?${search}` : ""}`;
};
export const go = (screen, values) => { location.hash = link(screen, values); };

/** A value kept for this tab, such as a recipe on its way from one screen to another. */
export function useKept(name, initial) {
  const [value, set] = useState(() => JSON.parse(sessionStorage.getItem(name)) ?? initial);
  const keep = useCallback((next) => set((before) => {
    const found = typeof next === "function" ? next(before) : next;
    sessionStorage.setItem(name, JSON.stringify(found));
    return found;
  }), [name]);
  return [value, keep];
}
export const keep = (name, value) => sessionStorage.setItem(name, JSON.stringify(value));
export const kept = (name, initial = null) => JSON.parse(sessionStorage.getItem(name)) ?? initial;
