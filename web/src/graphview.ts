import { h, setText } from "./dom";
import { createRenderer, nodeRadius, type Camera, type Renderer, type Scene } from "./renderer";

const REST_MS = 90;
const MAX_LABELS = 90;
const SLOW_MS = 26;

/** The drawing of the graph: pan, zoom and choose a node with pointer or keyboard. */
export class GraphView {
  readonly element: HTMLElement;
  readonly renderer: Renderer = createRenderer();
  private readonly labels = h("canvas", { class: "labels" });
  private readonly tip = h("div", { class: "tip", hidden: true });
  private scene: Scene | null = null;
  private ids: number[] = [];
  private camera: Camera = { scale: 1, x: 0, y: 0 };
  private fitted = true;
  private frame = 0;
  private movedAt = 0;
  private lastFrame = 0;
  /** The layer of edges that is being drawn. */
  private job: { camera: Camera; next: number } | null = null;
  private layerCamera: Camera | null = null;
  private chunk = 2000;
  private readonly observer = new ResizeObserver(() => this.resize());
  private readonly pointers = new Map<number, { x: number; y: number }>();
  private travelled = 0;

  constructor(private readonly choose: (id: number | null) => void, private readonly describe: (id: number) => string) {
    this.element = h("div", { class: "stage", tabindex: 0, role: "application", "aria-label": "Graph of the nodes. Arrow keys choose the next node, + and − zoom, 0 shows everything." }, this.renderer.canvas, this.labels, this.tip);
    this.element.addEventListener("pointerdown", (event) => this.onDown(event));
    this.element.addEventListener("pointermove", (event) => this.onMove(event));
    this.element.addEventListener("pointerup", (event) => this.onUp(event));
    this.element.addEventListener("pointercancel", (event) => this.onUp(event));
    this.element.addEventListener("pointerleave", () => (this.tip.hidden = true));
    this.element.addEventListener("wheel", (event) => this.onWheel(event), { passive: false });
    this.element.addEventListener("keydown", (event) => this.onKey(event));
    this.observer.observe(this.element);
  }

  close(): void {
    cancelAnimationFrame(this.frame);
    this.observer.disconnect();
    this.renderer.close();
  }

  show(scene: Scene, ids: number[], edgesChanged: boolean): void {
    const isNew = this.scene === null || this.scene.positions.length !== scene.positions.length;
    this.scene = scene;
    this.ids = ids;
    this.renderer.load(scene, edgesChanged);
    if (isNew) this.fit();
    if (edgesChanged || isNew) this.startJob();
    this.schedule();
  }

  /** Show all nodes. */
  fit(): void {
    const { width, height } = this.renderer.canvas;
    this.fitted = true;
    this.moveTo({ scale: 0.45 * Math.min(width, height), x: width / 2, y: height / 2 });
  }

  moveTo(camera: Camera): void {
    this.camera = camera;
    this.movedAt = performance.now();
    this.schedule();
  }

  private get ratio(): number {
    return Math.min(devicePixelRatio, 2);
  }

  private resize(): void {
    const [width, height] = [this.element.clientWidth * this.ratio, this.element.clientHeight * this.ratio];
    if (!width || !height) return;
    this.renderer.resize(width, height);
    this.labels.width = width;
    this.labels.height = height;
    this.layerCamera = null;
    if (this.fitted) this.fit();
    this.startJob();
    this.drawFrame(performance.now()); // at once: a canvas that was resized is empty
  }

  private startJob(): void {
    this.job = { camera: { ...this.camera }, next: 0 };
  }

  private schedule(): void {
    this.frame ||= requestAnimationFrame((now) => this.drawFrame(now));
  }

  private drawFrame(now: number): void {
    this.frame = 0;
    const scene = this.scene;
    if (!scene || !this.renderer.canvas.width) return;
    const took = now - this.lastFrame;
    this.lastFrame = now;
    if (this.job) this.drawSomeEdges(scene, took);
    this.renderer.draw(scene, this.camera);
    this.drawLabels(scene);
    const isAt = this.layerCamera && same(this.layerCamera, this.camera);
    if (!this.job && !isAt && (now - this.movedAt > REST_MS || this.isFar())) this.startJob();
    if (this.job || !isAt) this.schedule();
  }

  /** Draw a part of the edges: as many as fit into a frame on this machine. */
  private drawSomeEdges(scene: Scene, took: number): void {
    const job = this.job!;
    if (job.next > 0) this.chunk = took > SLOW_MS ? Math.max(150, this.chunk * 0.6) : Math.min(1e6, this.chunk * 1.3);
    const count = Math.ceil(this.chunk);
    this.renderer.drawEdges(scene, job.camera, job.next, count);
    job.next += count;
    if (job.next >= scene.edges.length / 4) {
      this.renderer.showEdges(job.camera);
      this.layerCamera = job.camera;
      this.job = null;
    }
  }

  /** Whether the layer of edges does not fit the camera any longer. */
  private isFar(): boolean {
    if (!this.layerCamera) return true;
    const zoom = this.camera.scale / this.layerCamera.scale;
    const { width, height } = this.renderer.canvas;
    const [dx, dy] = [this.camera.x - this.layerCamera.x * zoom, this.camera.y - this.layerCamera.y * zoom];
    return zoom > 2 || zoom < 0.5 || Math.abs(dx) > width * 0.6 || Math.abs(dy) > height * 0.6;
  }

  private drawLabels(scene: Scene): void {
    const { scale, x, y } = this.camera;
    const { width, height } = this.labels;
    const visible: number[] = [];
    const radius = nodeRadius(scene, this.camera);
    if (radius >= 7 * this.ratio) {
      for (let i = 0; i < this.ids.length && visible.length <= MAX_LABELS; i++) {
        const [px, py] = [scene.positions[2 * i]! * scale + x, scene.positions[2 * i + 1]! * scale + y];
        if (px > 0 && py > 0 && px < width && py < height) visible.push(i);
      }
    }
    const shown = visible.length > 0 && visible.length <= MAX_LABELS;
    this.labels.hidden = !shown; // an empty canvas costs time in every frame
    if (!shown) return;
    const context = this.labels.getContext("2d")!;
    context.clearRect(0, 0, width, height);
    context.font = `600 ${Math.round(radius * 0.85)}px system-ui, sans-serif`;
    context.textAlign = "center";
    context.textBaseline = "middle";
    for (const i of visible) {
      const [red, green, blue] = scene.colours.subarray(3 * i, 3 * i + 3);
      const isLight = scene.shapes[i] ? scene.background[0] > 127 : 0.3 * red! + 0.59 * green! + 0.11 * blue! > 140;
      context.fillStyle = isLight ? "#10161c" : "#ffffff";
      context.fillText(String(this.ids[i]), scene.positions[2 * i]! * scale + x, scene.positions[2 * i + 1]! * scale + y);
    }
  }

  /** The node under a point of the element; null if there is none. */
  private nodeAt(clientX: number, clientY: number): number | null {
    if (!this.scene) return null;
    const box = this.element.getBoundingClientRect();
    const [px, py] = [(clientX - box.left) * this.ratio, (clientY - box.top) * this.ratio];
    const { scale, x, y } = this.camera;
    let nearest: number | null = null;
    let limit = (nodeRadius(this.scene, this.camera) + 5 * this.ratio) ** 2;
    for (let i = 0; i < this.ids.length; i++) {
      const dx = this.scene.positions[2 * i]! * scale + x - px;
      const dy = this.scene.positions[2 * i + 1]! * scale + y - py;
      if (dx * dx + dy * dy < limit) {
        limit = dx * dx + dy * dy;
        nearest = i;
      }
    }
    return nearest;
  }

  private onDown(event: PointerEvent): void {
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
    this.travelled = 0;
    this.element.setPointerCapture(event.pointerId);
  }

  private onMove(event: PointerEvent): void {
    const before = this.pointers.get(event.pointerId);
    if (!before) return this.showTip(event);
    const others = [...this.pointers.entries()].filter(([id]) => id !== event.pointerId).map(([, at]) => at);
    const [dx, dy] = [event.clientX - before.x, event.clientY - before.y];
    this.travelled += Math.abs(dx) + Math.abs(dy);
    if (others[0]) {
      const distance = (at: { x: number; y: number }) => Math.hypot(at.x - others[0]!.x, at.y - others[0]!.y);
      this.zoom(distance({ x: event.clientX, y: event.clientY }) / Math.max(distance(before), 1), others[0].x, others[0].y);
    } else if (this.travelled > 3) {
      this.element.classList.add("moving");
      this.fitted = false;
      this.moveTo({ ...this.camera, x: this.camera.x + dx * this.ratio, y: this.camera.y + dy * this.ratio });
    }
    this.pointers.set(event.pointerId, { x: event.clientX, y: event.clientY });
  }

  private onUp(event: PointerEvent): void {
    this.element.classList.remove("moving");
    const isClick = this.pointers.delete(event.pointerId) && this.travelled <= 3 && event.type === "pointerup";
    if (!isClick) return;
    const found = this.nodeAt(event.clientX, event.clientY);
    this.choose(found === null ? null : this.ids[found]!);
  }

  private showTip(event: PointerEvent): void {
    const found = this.nodeAt(event.clientX, event.clientY);
    this.tip.hidden = found === null;
    if (found === null) return;
    const box = this.element.getBoundingClientRect();
    setText(this.tip, this.describe(this.ids[found]!));
    this.tip.style.left = `${Math.min(event.clientX - box.left + 12, box.width - this.tip.offsetWidth - 4)}px`;
    this.tip.style.top = `${Math.max(event.clientY - box.top - 30, 2)}px`;
  }

  private onWheel(event: WheelEvent): void {
    event.preventDefault();
    this.zoom(Math.exp(-event.deltaY * (event.deltaMode ? 0.05 : 0.0015)), event.clientX, event.clientY);
  }

  private zoom(factor: number, clientX?: number, clientY?: number): void {
    const box = this.element.getBoundingClientRect();
    const px = ((clientX ?? box.left + box.width / 2) - box.left) * this.ratio;
    const py = ((clientY ?? box.top + box.height / 2) - box.top) * this.ratio;
    const smallest = 0.1 * Math.min(box.width, box.height);
    const scale = Math.min(Math.max(this.camera.scale * factor, smallest), 400 * smallest);
    const real = scale / this.camera.scale;
    this.fitted = false;
    this.moveTo({ scale, x: px - (px - this.camera.x) * real, y: py - (py - this.camera.y) * real });
  }

  private onKey(event: KeyboardEvent): void {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step && this.scene && this.ids.length) {
      const at = this.scene.chosen ?? (step > 0 ? -1 : 0);
      this.choose(this.ids[(at + step + this.ids.length) % this.ids.length]!);
    } else if (event.key === "+" || event.key === "=") this.zoom(1.3);
    else if (event.key === "-") this.zoom(1 / 1.3);
    else if (event.key === "0") this.fit();
    else if (event.key === "Escape") this.choose(null);
    else return;
    event.preventDefault();
  }
}

function same(a: Camera, b: Camera): boolean {
  return a.scale === b.scale && a.x === b.x && a.y === b.y;
}
