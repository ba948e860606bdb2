import uPlot from "uplot";
import type { Numbers } from "./api";
import { withAlpha } from "./colours";
import { css, h, setText } from "./dom";
import * as format from "./format";
import type { Axis } from "./store";

export interface Line {
  label: string;
  values: Numbers;
  colour: string;
  dash?: number[];
}

export interface Band {
  low: Numbers;
  high: Numbers;
  colour: string;
  alpha: number;
  label: string;
}

export interface ChartData {
  x: Numbers;
  axis: Axis;
  lines: Line[];
  bands?: Band[];
  /** A vertical mark, such as the time of a replay. */
  mark?: number | null;
  show?: (value: number | null) => string;
}

const AXIS_LABELS: Record<Axis, string> = { rounds: "rounds", time: "time", bytes: "bytes sent by all nodes" };
const charts = new Set<Chart>();

/** Draw all charts again, because the theme changed. */
export function redrawCharts(): void {
  for (const chart of charts) chart.rebuild();
}

/** A chart with a title, a legend and lines; uPlot draws it. */
export class Chart {
  readonly element: HTMLElement;
  private readonly body = h("div", { class: "chart-body" });
  private readonly legend = h("div", { class: "legend" });
  private readonly empty = h("p", { class: "empty" });
  private plot: uPlot | null = null;
  private data: ChartData | null = null;
  private shape = "";
  private mark: number | null = null;
  private readonly observer: ResizeObserver;

  constructor(title: string, private readonly height = 240) {
    const heading = h("h3", {}, title);
    this.element = h("figure", { class: "chart" }, heading, this.legend, this.body, this.empty);
    this.element.setAttribute("aria-label", title);
    this.observer = new ResizeObserver(() => this.resize());
    this.observer.observe(this.body);
    charts.add(this);
  }

  set title(text: string) {
    setText(this.element.querySelector("h3")!, text);
    this.element.setAttribute("aria-label", text);
  }

  close(): void {
    this.observer.disconnect();
    this.plot?.destroy();
    charts.delete(this);
  }

  /** Show data, or a text that explains why there is none. */
  show(data: ChartData | string): void {
    const reason = typeof data === "string" ? data : data.x.length === 0 ? "No data yet." : "";
    setText(this.empty, reason);
    this.body.hidden = this.legend.hidden = reason !== "";
    if (reason || typeof data === "string") return;
    this.data = data;
    this.mark = data.mark ?? null;
    const shape = JSON.stringify([data.axis, data.lines.map((l) => [l.label, l.colour]), data.bands?.map((b) => b.label)]);
    if (!this.plot || shape !== this.shape) {
      this.shape = shape;
      this.rebuild();
    } else {
      this.plot.setData(this.columns(data));
    }
    const latest = data.lines.map((line) => `${line.label} ${this.format(last(line.values))}`);
    this.body.setAttribute("aria-label", `Latest: ${latest.join(", ")}`);
  }

  /** Move the vertical mark. */
  setMark(value: number | null): void {
    if (value === this.mark) return;
    this.mark = value;
    this.plot?.redraw(false);
  }

  rebuild(): void {
    this.plot?.destroy();
    this.plot = null;
    if (!this.data) return;
    const data = this.data;
    this.body.setAttribute("role", "img");
    this.legend.replaceChildren(
      ...data.lines.map((line) => key(line.label, line.colour, line.dash ? "dashed" : "line")),
      ...(data.bands ?? []).map((band) => key(band.label, withAlpha(band.colour, band.alpha), "band")),
    );
    this.plot = new uPlot(this.options(data), this.columns(data), this.body);
  }

  private format(value: number | null): string {
    return (this.data?.show ?? format.score)(value);
  }

  private columns(data: ChartData): uPlot.AlignedData {
    const bands = (data.bands ?? []).flatMap((band) => [band.high, band.low]);
    return [data.x as number[], ...bands, ...data.lines.map((line) => line.values)] as uPlot.AlignedData;
  }

  private options(data: ChartData): uPlot.Options {
    const [text, grid] = [css("--muted"), css("--grid")];
    const bands = data.bands ?? [];
    const axisValue = (value: number) =>
      data.axis === "bytes" ? format.bytes(value) : data.axis === "time" ? `${+value.toPrecision(6)} s` : String(value);
    const font = "12px system-ui, sans-serif";
    const axis = { stroke: text, grid: { stroke: grid, width: 1 }, ticks: { show: false }, font, labelFont: font };
    return {
      width: Math.max(this.body.clientWidth, 200),
      height: this.height,
      legend: { show: false },
      cursor: { y: false, points: { size: 7 }, drag: { x: true, y: false } },
      scales: { x: { time: false } },
      series: [
        {},
        ...bands.flatMap((band) => [edge(band), edge(band)]),
        ...data.lines.map((line) => ({
          label: line.label,
          stroke: line.colour,
          width: 2,
          dash: line.dash,
          spanGaps: true,
          points: { show: data.x.length < 40, size: 5, fill: line.colour },
        })),
      ],
      bands: bands.map((band, i) => ({
        series: [2 * i + 1, 2 * i + 2] as [number, number],
        fill: withAlpha(band.colour, band.alpha),
      })),
      axes: [
        { ...axis, label: AXIS_LABELS[data.axis], size: 30, labelSize: 24, labelGap: 2, space: 80, values: (_, found) => found.map(axisValue) },
        { ...axis, size: 62, values: (_, found) => found.map((v) => (data.show ? data.show(v) : String(+v.toPrecision(6)))) },
      ],
      hooks: { draw: [(plot) => this.drawMark(plot)], setCursor: [(plot) => this.showCursor(plot)] },
    };
  }

  private drawMark(plot: uPlot): void {
    if (this.mark === null) return;
    const x = plot.valToPos(this.mark, "x", true);
    const { ctx, bbox } = plot;
    if (x < bbox.left || x > bbox.left + bbox.width) return;
    ctx.save();
    ctx.strokeStyle = css("--accent");
    ctx.lineWidth = devicePixelRatio;
    ctx.setLineDash([4 * devicePixelRatio, 3 * devicePixelRatio]);
    ctx.beginPath();
    ctx.moveTo(x, bbox.top);
    ctx.lineTo(x, bbox.top + bbox.height);
    ctx.stroke();
    ctx.restore();
  }

  /** Show the values under the pointer in the legend. */
  private showCursor(plot: uPlot): void {
    const at = plot.cursor.idx;
    this.data?.lines.forEach((line, i) => {
      const value = at == null ? null : line.values[at] ?? null;
      const shown = this.legend.children[i]?.querySelector(".value");
      if (shown) setText(shown, at == null ? "" : this.format(value));
    });
  }

  private resize(): void {
    const width = this.body.clientWidth;
    if (this.plot && width && Math.abs(width - this.plot.width) > 1) this.plot.setSize({ width, height: this.height });
  }
}

function edge(band: Band): uPlot.Series {
  return { stroke: withAlpha(band.colour, 0), width: 0, points: { show: false }, spanGaps: true };
}

function key(label: string, colour: string, kind: string): HTMLElement {
  const swatch = h("span", { class: `swatch ${kind}` });
  swatch.style.setProperty("--swatch", colour);
  return h("span", { class: "key" }, swatch, label, h("span", { class: "value" }));
}

export function last(values: Numbers | undefined): number | null {
  for (let i = (values?.length ?? 0) - 1; i >= 0; i--) if (values![i] != null) return values![i]!;
  return null;
}
