import { get, Stream, type Details } from "./api";
import { last } from "./charts";
import { flatten } from "./compare";
import { CurvesTab } from "./curves";
import { h, replace, setText } from "./dom";
import * as format from "./format";
import { GraphTab } from "./graphtab";
import { Replay } from "./replay";
import { badge } from "./runs";
import { FAILED, RunData } from "./store";
import { TimelineTab } from "./timeline";
import { link, setConnected, type View } from "./view";

/** One tab of a run. */
export interface Tab {
  readonly element: HTMLElement;
  /** New records have arrived, or another time is shown. */
  update(): void;
  close(): void;
  recolour?(): void;
}

const TABS: [string, string][] = [
  ["curves", "Curves"],
  ["graph", "Graph"],
  ["timeline", "Timeline"],
  ["experiment", "Experiment"],
];

/** One run: its main numbers, and tabs. */
export function runView(main: HTMLElement, id: string, first: string): View {
  const run = new RunData();
  const details = get<Details>("details", { run: id });
  const title = h("h1", {}, id);
  const status = h("span", {});
  const subtitle = h("p", { class: "subtitle" }, "Reading the records…");
  const notice = h("p", { class: "notice", role: "status", hidden: true });
  const tiles = h("dl", { class: "tiles" });
  const panel = h("div", { class: "panel", role: "tabpanel", id: "panel", tabindex: -1 });
  const replay = new Replay(id, run, () => tab?.update());
  let tab: Tab | null = null;
  let ready = false;

  const buttons = TABS.map(([name, text]) =>
    h("button", { type: "button", role: "tab", id: `tab-${name}`, "aria-controls": "panel", click: () => open(name) }, text),
  );
  const tabs = h("div", { class: "tabs", role: "tablist", "aria-label": "Views of the run", keydown: (event) => moveTab(event as KeyboardEvent) }, ...buttons);
  const compare = h("a", { href: link("compare", id) }, "Compare");
  replace(
    main,
    h("div", { class: "heading" }, h("div", {}, h("div", { class: "title" }, title, status), subtitle), h("div", { class: "tools" }, compare)),
    notice,
    tiles,
    tabs,
    replay.element,
    panel,
  );
  replay.element.hidden = true;

  function open(name: string): void {
    const chosen = TABS.some(([known]) => known === name) ? name : "curves";
    buttons.forEach((button, i) => {
      const on = TABS[i]![0] === chosen;
      button.setAttribute("aria-selected", String(on));
      button.tabIndex = on ? 0 : -1;
    });
    panel.setAttribute("aria-labelledby", `tab-${chosen}`);
    history.replaceState(null, "", link("run", id, chosen));
    tab?.close();
    tab =
      chosen === "graph" ? new GraphTab(id, run, replay)
      : chosen === "timeline" ? new TimelineTab(id, run, replay)
      : chosen === "experiment" ? new ExperimentTab(details)
      : new CurvesTab(run, replay);
    replace(panel, tab.element);
    if (ready) tab.update();
  }

  function moveTab(event: KeyboardEvent): void {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    const at = buttons.findIndex((button) => button.getAttribute("aria-selected") === "true");
    const next = event.key === "Home" ? 0 : event.key === "End" ? TABS.length - 1 : step ? (at + step + TABS.length) % TABS.length : -1;
    if (next < 0) return;
    event.preventDefault();
    open(TABS[next]![0]);
    buttons[next]!.focus();
  }

  function update(): void {
    setText(title, run.info.name);
    document.title = `${run.info.name} – Shoal`;
    if (status.textContent !== run.info.status) replace(status, badge(run.info.status));
    showTiles(tiles, run);
    const notes = [];
    if (run.info.problem) notes.push(run.info.problem);
    if (run.damaged) notes.push(`${run.damaged} damaged lines of the records were left out.`);
    if (run.nodeCount === 0) notes.push("This run has no records yet.");
    setText(notice, notes.join(" "));
    notice.hidden = notes.length === 0;
    replay.update();
    tab?.update();
  }

  details.then(
    ({ experiment }) => setText(subtitle, describe(experiment, id)),
    (error: Error) => setText(subtitle, error.message),
  );
  open(first);
  const stream = new Stream([id], true, {
    run: (changes) => {
      run.apply(changes);
      ready = true;
      update();
    },
    problem: (_, error) => {
      setText(notice, error);
      notice.hidden = false;
    },
  }, setConnected);
  return {
    title: id,
    close: () => {
      stream.close();
      replay.close();
      tab?.close();
    },
    recolour: () => tab?.recolour?.(),
  };
}

function describe(experiment: Record<string, unknown>, id: string): string {
  const settings = flatten(experiment);
  const shown = ["algorithm", "sharing", "topology", "dataset", "model"].map((name) => settings.get(name)).filter(Boolean);
  return [...shown, id].join(" · ");
}

function showTiles(tiles: HTMLElement, run: RunData): void {
  const curve = run.metric ? run.curves[run.metric] : undefined;
  const failed = [...run.now.nodes.values()].filter((node) => node.state === FAILED).length;
  const rounds = run.now.latestRound;
  const planned = run.isLive && run.info.rounds ? ` of ${format.count(run.info.rounds)}` : "";
  const clock = run.info.engine === "simulation" ? "Virtual time" : "Time";
  const spread = curve ? `${format.score(last(curve.min))} to ${format.score(last(curve.max))}` : "";
  const values: [string, string, string][] = [
    ["Round", format.count(rounds) + planned, ""],
    [run.metric ?? "Score", format.score(last(curve?.mean)), spread],
    ["Averaged model", format.score(last(run.averages.scores[run.metric ?? ""])), ""],
    ["Nodes", format.count(run.nodeCount), failed ? `${failed} failed` : ""],
    ["Sent", format.bytes(last(run.training.bytes?.sum)), `${format.count(last(run.training.messages?.sum))} messages`],
    [clock, format.seconds(run.duration), ""],
  ];
  if (tiles.children.length !== values.length) {
    replace(tiles, ...values.map(() => h("div", { class: "tile" }, h("dt"), h("dd"), h("span", { class: "detail" }))));
  }
  values.forEach(([name, value, detail], i) => {
    const [term, shown, below] = tiles.children[i]!.children;
    setText(term!, name);
    setText(shown!, value);
    setText(below!, detail);
  });
}

/** The settings of the experiment, and the summary. */
class ExperimentTab implements Tab {
  readonly element = h("div", { class: "grid" });

  constructor(details: Promise<Details>) {
    details.then(
      (found) => {
        const problems = found.problems.map((problem) => h("p", { class: "notice" }, problem));
        const tables = ([["Experiment", found.experiment], ["Summary", found.summary]] as const).map(([title, table]) => settingsTable(title, table));
        replace(this.element, ...problems, ...tables);
      },
      (error: Error) => replace(this.element, h("p", { class: "notice" }, error.message)),
    );
  }

  update(): void {
    // it does not change
  }

  close(): void {
    // nothing to release
  }
}

function settingsTable(title: string, table: Record<string, unknown>): HTMLElement {
  const rows = [...flatten(table)].map(([name, value]) => h("tr", {}, h("th", { scope: "row" }, name), h("td", {}, value)));
  const content = rows.length ? h("table", { class: "settings" }, h("tbody", {}, ...rows)) : h("p", { class: "empty" }, "Not written yet.");
  return h("section", { class: "card scroll" }, h("h3", {}, title), content);
}
