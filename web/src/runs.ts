import { Stream, type RunInfo } from "./api";
import { h, replace, setText } from "./dom";
import * as format from "./format";
import { link, setConnected, type View } from "./view";

export function badge(status: string): HTMLElement {
  return h("span", { class: `badge ${/^[a-z]+$/.test(status) ? status : "unfinished"}` }, status);
}

/** The table of all runs. */
export function runsView(main: HTMLElement): View {
  let runs: RunInfo[] | null = null;
  const chosen = new Set<string>();
  const rows = h("tbody");
  const note = h("p", { class: "empty" }, "Reading the runs…");
  const filter = h("input", { type: "search", placeholder: "Filter by name", "aria-label": "Filter by name", input: () => show() });
  const compare = h("button", { type: "button", class: "primary", click: () => (location.hash = link("compare", ...chosen)) });
  const heads = ["", "Run", "Status", "Engine", "Nodes", "Rounds", "Score", "Seed", "Started"];
  const numbers = new Set(["Nodes", "Rounds", "Score", "Seed"]);
  const table = h(
    "table",
    { class: "runs" },
    h("caption", { class: "hidden" }, "All runs, the newest first"),
    h("thead", {}, h("tr", {}, ...heads.map((head) => h("th", { scope: "col", class: numbers.has(head) ? "number" : "" }, head || h("span", { class: "hidden" }, "Compare"))))),
    rows,
  );
  replace(
    main,
    h("div", { class: "heading" }, h("h1", {}, "Runs"), h("div", { class: "tools" }, filter, compare)),
    h("div", { class: "card scroll" }, table, note),
  );

  function show(): void {
    setText(compare, chosen.size ? `Compare ${chosen.size} run${chosen.size > 1 ? "s" : ""}` : "Compare runs");
    compare.disabled = chosen.size === 0;
    if (!runs) return;
    const wanted = filter.value.toLowerCase();
    const found = runs.filter((run) => `${run.name} ${run.id}`.toLowerCase().includes(wanted));
    setText(note, runs.length === 0 ? "There is no run in this folder. Start one with: shoal run FILE" : found.length ? "" : "No run has this name.");
    note.hidden = found.length > 0;
    table.hidden = found.length === 0;
    const focused = (document.activeElement as HTMLElement | null)?.dataset.key;
    replace(rows, ...found.map(row));
    if (focused) rows.querySelector<HTMLElement>(`[data-key="${CSS.escape(focused)}"]`)?.focus();
  }

  function row(run: RunInfo): HTMLElement {
    const box = h("input", {
      type: "checkbox",
      "aria-label": `Compare ${run.name} ${run.id}`,
      "data-key": `box ${run.id}`,
      change: () => {
        if (box.checked) chosen.add(run.id);
        else chosen.delete(run.id);
        show();
      },
    });
    box.checked = chosen.has(run.id);
    const name = h("a", { href: link("run", run.id), "data-key": `link ${run.id}` }, run.name);
    const id = h("span", { class: "detail" }, run.problem || (run.id === "." ? "" : run.id));
    const metric = run.metric && run.metric !== "accuracy" ? ` ${run.metric}` : "";
    return h(
      "tr",
      {},
      h("td", {}, box),
      h("td", { class: "name" }, name, id),
      h("td", {}, badge(run.status)),
      h("td", {}, run.engine || "–"),
      h("td", { class: "number" }, format.count(run.nodes)),
      h("td", { class: "number" }, format.count(run.rounds)),
      h("td", { class: "number" }, run.score === null ? "–" : format.score(run.score) + metric),
      h("td", { class: "number" }, run.seed === null ? "–" : String(run.seed)),
      h("td", {}, format.moment(run.created)),
    );
  }

  show();
  const stream = new Stream([], false, { runs: (found) => ((runs = found), show()) }, setConnected);
  return { title: "Runs", close: () => stream.close() };
}
