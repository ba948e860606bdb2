import { get, type NodeDetails } from "./api";
import { Chart } from "./charts";
import { KINDS } from "./colours";
import { h, replace, setText } from "./dom";
import * as format from "./format";
import { byName, type NodeValues, type RunData } from "./store";

const STATES = ["running", "ended", "failed"];
const SHOWN_RECORDS = 100;
const SLOWEST_MS = 1000;

/** One node: its curves, events, data and latest records. */
export class NodePanel {
  readonly element = h("aside", { class: "card node-panel", "aria-label": "The chosen node" });
  private readonly hint = h("p", { class: "empty" }, "Choose a node to see its curves, its records and its data.");
  private readonly score = new Chart("Score", 170);
  private readonly loss = new Chart("Training loss", 150);
  private readonly title = h("span", {});
  private readonly facts = h("p", { class: "facts" });
  private readonly events = h("div", {});
  private readonly data = h("div", {});
  private readonly records = h("pre", { tabindex: 0, "aria-label": "Latest records" });
  private readonly body: HTMLElement;
  private node: number | null = null;
  private details: NodeDetails | null = null;
  private busy = false;
  private readAt = 0;
  /** The latest values of the node when its records were read. */
  private seen: NodeValues | undefined;
  private resets = 0;
  private timer = 0;

  constructor(private readonly id: string, private readonly run: RunData, private readonly leave: () => void) {
    const close = h("button", { type: "button", class: "quiet", "aria-label": "Close the node", click: () => this.leave() }, "Close");
    const records = h("details", {}, h("summary", {}, "Latest records"), this.records);
    this.body = h("div", { class: "node-panel" }, h("h2", {}, this.title, close), this.facts, this.score.element, this.loss.element, this.events, this.data, records);
    replace(this.element, this.hint, this.body);
    this.body.hidden = true;
  }

  close(): void {
    this.score.close();
    this.loss.close();
    this.node = null;
    clearTimeout(this.timer);
  }

  show(node: number | null): void {
    this.hint.hidden = node !== null;
    this.body.hidden = node === null;
    if (node === this.node) return;
    this.node = node;
    this.details = null;
    clearTimeout(this.timer);
    setText(this.title, node === null ? "" : `Node ${node}`);
    setText(this.facts, "Reading…");
    for (const part of [this.events, this.data, this.records]) part.replaceChildren();
    this.score.show("Reading…");
    this.loss.show("Reading…");
    void this.read();
  }

  /** New records have arrived. */
  update(): void {
    if (this.node === null || (this.run.now.nodes.get(this.node) === this.seen && this.run.resets === this.resets)) return;
    clearTimeout(this.timer);
    this.timer = window.setTimeout(() => void this.read(), Math.max(0, this.readAt + SLOWEST_MS - performance.now()));
  }

  /** Read the records of the node that the page does not have. */
  private async read(): Promise<void> {
    const node = this.node;
    if (node === null || this.busy) return;
    this.busy = true;
    this.readAt = performance.now();
    this.seen = this.run.now.nodes.get(node);
    if (this.run.resets !== this.resets) this.details = null;
    this.resets = this.run.resets;
    const known = this.details;
    const isWanted = () => node === this.node && known === this.details;
    let again = false;
    try {
      const found = await get<NodeDetails>("node", { run: this.id, node, offset: known?.offset ?? 0 });
      again = !isWanted();
      if (!again && this.run.resets === this.resets) {
        this.details = known ? join(known, found) : found;
        this.draw(this.details);
      }
    } catch (error) {
      again = !isWanted();
      if (!again) setText(this.facts, (error as Error).message);
      this.seen = undefined;
    } finally {
      this.busy = false;
      if (again) void this.read();
      else this.update();
    }
  }

  private draw(details: NodeDetails): void {
    const values = this.run.now.nodes.get(details.node);
    const sent = details.rounds.bytes.at(-1);
    setText(this.facts, [STATES[values?.state ?? 0], `round ${values?.round ?? 0}`, `${format.bytes(sent)} sent`, `${format.count(details.count)} records`].join(" · "));
    const metric = this.run.metric;
    const scores = metric ? byName(details.evaluations.scores)[metric] : undefined;
    if (metric && scores) {
      this.score.title = metric;
      this.score.show({ x: details.evaluations.round, axis: "rounds", lines: [{ label: `node ${details.node}`, values: scores, colour: KINDS[0]! }] });
    } else this.score.show("Not evaluated.");
    const { round, loss } = details.rounds;
    if (loss.some((value) => value !== null)) this.loss.show({ x: round, axis: "rounds", lines: [{ label: "loss", values: loss, colour: KINDS[0]! }] });
    else this.loss.show("No training loss.");
    const items = details.events.map((event) => h("li", {}, `${format.seconds(event.time)}: ${event.what}${event.detail ? `, ${event.detail}` : ""}${(event.count ?? 1) > 1 ? ` (${event.count} times)` : ""}`));
    replace(this.events, h("h3", {}, "Events"), items.length ? h("ul", {}, ...items) : h("p", { class: "facts" }, "None."));
    replace(this.data, h("h3", {}, "Data"), this.describeData(details));
    setText(this.records, details.records.join("\n"));
  }

  private describeData(details: NodeDetails): HTMLElement {
    const data = details.data;
    if (!data) return h("p", { class: "facts" }, "This run did not write the data of its nodes.");
    const entries = Object.entries(data.classes as Record<string, number> | undefined ?? {});
    const most = Math.max(1, ...entries.map(([, number]) => number));
    const bars = entries.flatMap(([name, number]) => {
      const bar = h("span", { class: "bar" });
      bar.style.width = `${(100 * number) / most}%`;
      return [h("span", {}, name), h("span", {}, bar), h("span", {}, format.count(number))];
    });
    const size = h("p", { class: "facts" }, `${format.count(data.samples as number)} training samples${entries.length ? ", by class:" : ""}`);
    return h("div", {}, size, h("div", { class: "bars" }, ...bars));
  }
}

function join(old: NodeDetails, found: NodeDetails): NodeDetails {
  const scores = byName(old.evaluations.scores);
  const before = old.evaluations.round.length;
  for (const [name, values] of Object.entries(found.evaluations.scores)) {
    scores[name] = [...(scores[name] ?? new Array<null>(before).fill(null)), ...values];
  }
  return {
    ...found,
    data: found.data ?? old.data,
    count: old.count + found.count,
    rounds: {
      round: [...old.rounds.round, ...found.rounds.round],
      time: [...old.rounds.time, ...found.rounds.time],
      loss: [...old.rounds.loss, ...found.rounds.loss],
      bytes: [...old.rounds.bytes, ...found.rounds.bytes],
      messages: [...old.rounds.messages, ...found.rounds.messages],
    },
    evaluations: {
      round: [...old.evaluations.round, ...found.evaluations.round],
      time: [...old.evaluations.time, ...found.evaluations.time],
      scores,
    },
    events: [...old.events, ...found.events],
    records: [...old.records, ...found.records].slice(-SHOWN_RECORDS),
  };
}
