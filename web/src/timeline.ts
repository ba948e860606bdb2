import { get, type TimelinePart } from "./api";
import { css, h, labelled, select, setText } from "./dom";
import * as format from "./format";
import type { Replay } from "./replay";
import type { Tab } from "./run";
import type { RunData } from "./store";

const ROW = 16;
const LEFT = 64;
const RIGHT = 8;
const TOP = 24;
const HEIGHT = 520;
const KINDS: [string, string][] = [
  ["train", "train"], ["wait", "wait for messages"], ["send", "send"], ["offline", "offline"], ["idle", "idle"], ["failed", "failed"],
];
const FASTEST_MS = 900;

/** What each node did, and when: one row per node. */
export class TimelineTab implements Tab {
  readonly element: HTMLElement;
  private readonly canvas = h("canvas", { class: "timeline", role: "img" });
  private readonly spacer = h("div", { class: "spacer" });
  private readonly scroller = h("div", { class: "scroller", tabindex: 0, "aria-label": "Rows of nodes; arrow keys scroll, + and − zoom" }, this.canvas, this.spacer);
  private readonly note = h("p", { class: "empty" });
  private readonly range = h("output", { class: "moment" });
  private readonly body: HTMLElement;
  private order = "node";
  /** The shown part of the run, as shares of its duration. */
  private from = 0;
  private to = 1;
  private part: TimelinePart | null = null;
  private wanted = "";
  private busy = false;
  private read = 0;
  private timer = 0;
  private readonly observer = new ResizeObserver(() => this.request());

  constructor(private readonly id: string, private readonly run: RunData, private readonly replay: Replay) {
    const orders: [string, string][] = [["node", "node"], ["train", "time to train, longest first"], ["wait", "time to wait, longest first"]];
    const order = select(orders, this.order, (value) => ((this.order = value), this.request()));
    const zoom = (factor: number) => () => this.zoom(factor, (this.from + this.to) / 2);
    const buttons = [
      h("button", { type: "button", "aria-label": "Zoom in", click: zoom(0.5) }, "+"),
      h("button", { type: "button", "aria-label": "Zoom out", click: zoom(2) }, "−"),
      h("button", { type: "button", click: () => ((this.from = 0), (this.to = 1), this.request()) }, "Whole run"),
    ];
    const legend = h("div", { class: "legend" }, ...KINDS.map(([kind, text]) => h("span", { class: "key" }, h("span", { class: `swatch ${kind}` }), text)));
    this.body = h("div", {}, legend, this.scroller);
    this.element = h("div", { class: "card" }, h("div", { class: "tools" }, labelled("Order by", order), ...buttons, this.range), this.note, this.body);
    this.scroller.addEventListener("scroll", () => this.request());
    this.scroller.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.scroller.addEventListener("keydown", (event) => this.onKey(event));
    this.observer.observe(this.scroller);
  }

  close(): void {
    clearTimeout(this.timer);
    this.observer.disconnect();
  }

  recolour(): void {
    this.draw();
  }

  update(): void {
    const missing = this.run.nodeCount === 0 ? "No records yet." : !this.run.hasSpans ? "This run has no timeline: its records do not contain what nodes did. Runs of earlier versions do not have it." : "";
    setText(this.note, missing);
    this.note.hidden = missing === "";
    this.body.hidden = missing !== "";
    if (!missing) this.request();
    this.draw();
  }

  private onWheel(event: WheelEvent): void {
    if (!event.ctrlKey && !event.shiftKey) return; // scrolls the rows
    event.preventDefault();
    const box = this.canvas.getBoundingClientRect();
    const share = Math.min(Math.max((event.clientX - box.left - LEFT) / (box.width - LEFT), 0), 1);
    this.zoom(event.deltaY > 0 ? 1.25 : 0.8, this.from + share * (this.to - this.from));
  }

  private onKey(event: KeyboardEvent): void {
    const width = this.to - this.from;
    const middle = (this.from + this.to) / 2;
    if (event.key === "+" || event.key === "=") this.zoom(0.5, middle);
    else if (event.key === "-") this.zoom(2, middle);
    else if (event.key === "ArrowLeft") this.shift(-width / 4);
    else if (event.key === "ArrowRight") this.shift(width / 4);
    else return;
    event.preventDefault();
  }

  private shift(by: number): void {
    const moved = Math.min(Math.max(by, -this.from), 1 - this.to);
    this.from += moved;
    this.to += moved;
    this.request();
  }

  private zoom(factor: number, around: number): void {
    const width = Math.min(Math.max((this.to - this.from) * factor, 1e-4), 1);
    this.from = Math.min(Math.max(around - (around - this.from) * factor, 0), 1 - width);
    this.to = this.from + width;
    this.request();
  }

  /** Read what is visible, unless the page has it; at most about once a second while the run goes on. */
  private request(): void {
    const duration = this.run.duration;
    if (!duration || !this.run.hasSpans) return;
    const rows = Math.floor((HEIGHT - TOP) / ROW);
    this.spacer.style.height = `${Math.max(0, this.run.nodeCount * ROW + TOP - HEIGHT)}px`;
    const first = Math.min(Math.floor(this.scroller.scrollTop / ROW), Math.max(0, this.run.nodeCount - rows));
    const bins = Math.max(50, Math.floor(this.scroller.clientWidth - LEFT));
    const parameters = { run: this.id, first, count: rows, bins, order: this.order, start: this.from * duration, end: this.to * duration };
    const wanted = JSON.stringify(parameters);
    if (wanted === this.wanted || this.busy) return;
    const isSamePlace = this.part !== null && this.part.bins === bins && this.from === 0 && this.to === 1;
    const wait = isSamePlace && first === this.first ? this.read + FASTEST_MS - performance.now() : 0;
    clearTimeout(this.timer);
    if (wait > 0) {
      this.timer = window.setTimeout(() => this.request(), wait);
      return;
    }
    this.busy = true;
    this.wanted = wanted;
    this.read = performance.now();
    get<TimelinePart>("timeline", parameters).then(
      (part) => {
        this.busy = false;
        this.part = part;
        this.first = first;
        this.draw();
        this.request();
      },
      (error: Error) => {
        this.busy = false;
        setText(this.note, error.message);
        this.note.hidden = false;
      },
    );
  }

  private first = 0;

  private draw(): void {
    const part = this.part;
    if (!part || this.body.hidden) return;
    const ratio = Math.min(devicePixelRatio, 2);
    const width = this.scroller.clientWidth;
    this.canvas.width = width * ratio;
    this.canvas.height = HEIGHT * ratio;
    this.canvas.style.width = `${width}px`;
    this.canvas.style.height = `${HEIGHT}px`;
    const context = this.canvas.getContext("2d")!;
    context.scale(ratio, ratio);
    context.font = "11px system-ui, sans-serif";
    const colours = [...KINDS.map(([kind]) => css(`--span-${kind}`)), ""];
    const scale = (width - LEFT - RIGHT) / part.bins;
    part.rows.forEach((row, i) => {
      const y = TOP + i * ROW;
      let x = LEFT;
      for (let k = 0; k < row.length; k += 2) {
        const length = row[k + 1]! * scale;
        if (colours[row[k]!]) {
          context.fillStyle = colours[row[k]!]!;
          context.fillRect(x, y + 2, Math.max(length, 0.5), ROW - 4);
        }
        x += length;
      }
      context.fillStyle = css("--muted");
      context.textAlign = "right";
      context.fillText(String(part.id[i]), LEFT - 8, y + 12);
    });
    this.drawTimes(context, part, width - LEFT - RIGHT);
    setText(this.range, `${format.seconds(part.start)} to ${format.seconds(part.end)}`);
    this.canvas.setAttribute("aria-label", `What nodes ${part.id[0]} to ${part.id[part.id.length - 1]} did from ${format.seconds(part.start)} to ${format.seconds(part.end)}`);
  }

  private drawTimes(context: CanvasRenderingContext2D, part: TimelinePart, width: number): void {
    const place = (time: number) => LEFT + ((time - part.start) / (part.end - part.start)) * width;
    const rough = (part.end - part.start) / Math.max(2, width / 110);
    const power = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((n) => n * power).find((n) => n >= rough)!;
    context.textAlign = "center";
    for (let time = Math.ceil(part.start / step) * step; time <= part.end; time += step) {
      context.fillStyle = css("--muted");
      const text = `${+time.toPrecision(6)} s`;
      const half = context.measureText(text).width / 2;
      context.fillText(text, Math.min(place(time), LEFT + width + RIGHT - half), 13);
      context.fillStyle = css("--grid");
      context.fillRect(Math.round(place(time)), TOP - 4, 1, part.rows.length * ROW + 4);
    }
    const at = this.replay.at;
    if (at !== null && at >= part.start && at <= part.end) {
      context.fillStyle = css("--accent");
      context.fillRect(Math.round(place(at)) - 1, TOP - 6, 2, part.rows.length * ROW + 6);
    }
  }
}

