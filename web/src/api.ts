export type Numbers = (number | null)[];

export interface RunInfo {
  id: string;
  name: string;
  status: string;
  created: number;
  engine: string;
  nodes: number | null;
  seed: number | null;
  rounds: number | null;
  metric: string | null;
  score: number | null;
  problem: string;
}

/** Points of a curve that changed: `rows` are their places among `size` points. */
export interface CurvePart {
  size: number;
  rows: number[];
  [column: string]: Numbers | number;
}

export interface NodeStates {
  id: number[];
  round: number[];
  time: number[];
  loss: Numbers;
  state: number[];
  scores: Record<string, Numbers>;
}

export interface Edges {
  id: number[];
  count: number[];
  to: number[];
  left_out: number;
}

export interface Averages {
  /** The number of the round or, in a run that is evaluated by time, of the evaluation. */
  moment: number[];
  round: Numbers;
  time: Numbers;
  consensus: Numbers;
  scores: Record<string, Numbers>;
}

export interface RunChanges {
  run: string;
  cursor: string;
  reset: boolean;
  info: RunInfo;
  duration: number;
  nodes: number;
  damaged: number;
  metric: string | null;
  has_edges: boolean;
  has_spans: boolean;
  curves: Record<string, CurvePart>;
  training?: Record<string, CurvePart>;
  averages?: Averages;
  state?: NodeStates;
  edges?: Edges;
}

export interface RunState {
  at: number;
  state: NodeStates;
  edges: Edges;
}

export interface NodeEvent {
  what: string;
  time: number;
  detail: string;
  count?: number;
}

export interface NodeDetails {
  node: number;
  offset: number;
  count: number;
  rounds: { round: number[]; time: Numbers; loss: Numbers; bytes: number[]; messages: number[] };
  evaluations: { round: number[]; time: Numbers; scores: Record<string, Numbers> };
  events: NodeEvent[];
  records: string[];
  data: Record<string, unknown> | null;
}

export interface TimelinePart {
  start: number;
  end: number;
  bins: number;
  total: number;
  id: number[];
  rows: number[][];
}

export interface Details {
  experiment: Record<string, unknown>;
  summary: Record<string, unknown>;
  problems: string[];
}

export async function get<T>(name: string, parameters: Record<string, string | number> = {}): Promise<T> {
  const query = new URLSearchParams(Object.entries(parameters).map(([k, v]) => [k, String(v)]));
  const response = await fetch(`api/${name}?${query}`);
  if (response.status === 401) throw new Error(await response.text());
  const content = (await response.json()) as T & { error?: string };
  if (!response.ok) throw new Error(content.error ?? `the server answered ${response.status}`);
  return content;
}

export interface Listener {
  runs?(runs: RunInfo[]): void;
  run?(changes: RunChanges): void;
  problem?(run: string, error: string): void;
}

/** The one connection of the page. It pauses while the page is hidden, and continues after what it has received. */
export class Stream {
  private source: EventSource | null = null;
  private cursors = new Map<string, string>();
  private retry = 0;
  private readonly onVisibility = () => (document.hidden ? this.disconnect() : this.connect());

  constructor(
    private readonly runs: string[],
    private readonly withNodes: boolean,
    private readonly listener: Listener,
    private readonly status: (connected: boolean) => void,
  ) {
    document.addEventListener("visibilitychange", this.onVisibility);
    if (!document.hidden) this.connect();
  }

  close(): void {
    document.removeEventListener("visibilitychange", this.onVisibility);
    this.disconnect();
  }

  private disconnect(): void {
    clearTimeout(this.retry);
    this.source?.close();
    this.source = null;
  }

  private connect(): void {
    this.disconnect();
    const query = new URLSearchParams();
    for (const run of this.runs) {
      query.append("run", run);
      query.append("cursor", this.cursors.get(run) ?? "");
    }
    if (this.withNodes) query.set("nodes", "1");
    const source = (this.source = new EventSource(`api/stream?${query}`));
    source.addEventListener("open", () => this.status(true));
    source.addEventListener("error", () => {
      this.status(false);
      this.disconnect(); // the browser would ask again for everything since the first cursor
      this.retry = window.setTimeout(() => this.connect(), 2000);
    });
    source.addEventListener("runs", (event) => this.listener.runs?.(JSON.parse((event as MessageEvent).data)));
    source.addEventListener("run", (event) => {
      const changes = JSON.parse((event as MessageEvent).data) as RunChanges;
      this.cursors.set(changes.run, changes.cursor);
      this.listener.run?.(changes);
    });
    source.addEventListener("problem", (event) => {
      const { run, error } = JSON.parse((event as MessageEvent).data);
      this.listener.problem?.(run, error);
    });
  }
}
