import createREGL, { type Framebuffer2D, type Regl } from "regl";
import type { Colour } from "./colours";

/** Where the graph is on the screen: pixels per unit, and the place of the origin, in pixels. */
export interface Camera {
  scale: number;
  x: number;
  y: number;
}

/** What is drawn. Positions are x, y of each node; edges are x, y of both ends. */
export interface Scene {
  positions: Float32Array;
  colours: Float32Array;
  /** 0: a disc; 1: a ring, for failed nodes. */
  shapes: Float32Array;
  radius: number;
  edges: Float32Array;
  /** Edges of the chosen node. */
  chosenEdges: Float32Array;
  chosen: number | null;
  background: Colour;
  edgeColour: Colour;
  accent: Colour;
}

/**
 * Draws a graph. Edges are drawn to a layer of their own, some of them in each frame, because thousands of lines are
 * slow without a graphics card. While the camera moves, the layer moves with it, and it is drawn again at rest.
 */
export interface Renderer {
  readonly canvas: HTMLCanvasElement;
  readonly kind: "WebGL" | "2D canvas";
  resize(width: number, height: number): void;
  /** The nodes or edges have changed. */
  load(scene: Scene, edgesChanged: boolean): void;
  /** Draw edges from `first` on, at most `count`, to the layer that is shown next. */
  drawEdges(scene: Scene, camera: Camera, first: number, count: number): void;
  /** Show the layer that `drawEdges` has finished. */
  showEdges(camera: Camera): void;
  draw(scene: Scene, camera: Camera): void;
  close(): void;
}

export function createRenderer(): Renderer {
  try {
    return new WebGLRenderer();
  } catch {
    return new CanvasRenderer(); // no WebGL on this machine
  }
}

const unit = (colour: Colour): Colour => colour.map((value) => value / 255) as Colour;

class WebGLRenderer implements Renderer {
  readonly kind = "WebGL";
  readonly canvas = document.createElement("canvas");
  private readonly regl: Regl;
  private readonly layers: Framebuffer2D[];
  private shown: Camera | null = null;
  private readonly buffers;
  private readonly lines;
  private readonly layer;
  private readonly points;

  constructor() {
    const attributes = { antialias: false, alpha: false, depth: false, stencil: false };
    const regl = (this.regl = createREGL({ canvas: this.canvas, attributes }));
    this.layers = [0, 1].map(() => regl.framebuffer({ width: 1, height: 1, depthStencil: false }));
    const buffer = () => regl.buffer({ usage: "dynamic", type: "float", length: 8 });
    this.buffers = { positions: buffer(), colours: buffer(), shapes: buffer(), edges: buffer(), chosen: buffer() };
    const blend = { enable: true, func: { src: "one", dst: "one minus src alpha" } } as const;
    const place = `
      precision highp float;
      uniform vec3 camera; uniform vec2 size;
      vec4 placed(vec2 p) { return vec4((p * camera.x + camera.yz) / size * vec2(2.0, -2.0) + vec2(-1.0, 1.0), 0.0, 1.0); }`;
    const shared = { depth: { enable: false }, blend };
    type Props = { camera: number[]; size: number[] };
    const uniforms = { camera: regl.prop<Props, "camera">("camera"), size: regl.prop<Props, "size">("size") };
    this.lines = regl({
      ...shared,
      vert: `${place} attribute vec2 p; void main() { gl_Position = placed(p); }`,
      frag: "precision mediump float; uniform vec4 colour; void main() { gl_FragColor = colour; }",
      attributes: { p: (_: unknown, props: { buffer: string }) => ({ buffer: this.buffers[props.buffer as "edges"] }) } as never,
      uniforms: { ...uniforms, colour: regl.prop<{ colour: number[] }, "colour">("colour") } as never,
      primitive: "lines",
      offset: regl.prop<{ offset: number }, "offset">("offset"),
      count: regl.prop<{ count: number }, "count">("count"),
      framebuffer: regl.prop<{ framebuffer: Framebuffer2D | null }, "framebuffer">("framebuffer"),
    });
    this.layer = regl({
      ...shared,
      vert: `precision highp float; attribute vec2 p; uniform vec4 box; varying vec2 at;
        void main() { at = p; gl_Position = vec4(mix(box.xy, box.zw, p), 0.0, 1.0); }`,
      frag: "precision mediump float; uniform sampler2D layer; varying vec2 at; void main() { gl_FragColor = texture2D(layer, at); }",
      attributes: { p: [[0, 0], [1, 0], [0, 1], [1, 1]] },
      uniforms: { layer: regl.prop<{ layer: Framebuffer2D }, "layer">("layer"), box: regl.prop<{ box: number[] }, "box">("box") },
      primitive: "triangle strip",
      count: 4,
    });
    this.points = regl({
      ...shared,
      vert: `${place} attribute vec2 p; attribute vec3 c; attribute float s; uniform float radius;
        varying vec3 colour; varying float ring;
        void main() { colour = c; ring = s; gl_PointSize = 2.0 * radius + 2.0; gl_Position = placed(p); }`,
      frag: `precision mediump float; varying vec3 colour; varying float ring; uniform float radius; uniform vec3 rim;
        void main() {
          float away = length(gl_PointCoord - 0.5) * (2.0 * radius + 2.0);
          float inside = clamp(radius - away + 0.5, 0.0, 1.0);
          if (inside <= 0.0) discard;
          float hole = ring * clamp(radius * 0.55 - away + 0.5, 0.0, 1.0);
          float border = (1.0 - ring) * clamp(away - radius + 1.5, 0.0, 1.0);
          gl_FragColor = vec4(mix(colour, rim, max(hole, border * 0.8)) * inside, inside);
        }`,
      attributes: { p: this.buffers.positions, c: this.buffers.colours, s: this.buffers.shapes },
      uniforms: { ...uniforms, radius: regl.prop<{ radius: number }, "radius">("radius"), rim: regl.prop<{ rim: number[] }, "rim">("rim") } as never,
      primitive: "points",
      offset: regl.prop<{ offset: number }, "offset">("offset"),
      count: regl.prop<{ count: number }, "count">("count"),
    });
  }

  private get view() {
    return { size: [this.canvas.width, this.canvas.height] };
  }

  resize(width: number, height: number): void {
    this.canvas.width = width;
    this.canvas.height = height;
    for (const layer of this.layers) layer.resize(width, height);
    this.shown = null;
  }

  load(scene: Scene, edgesChanged: boolean): void {
    this.buffers.positions(scene.positions);
    this.buffers.colours(scene.colours.map((value) => value / 255));
    this.buffers.shapes(scene.shapes);
    this.buffers.chosen(scene.chosenEdges);
    if (edgesChanged) this.buffers.edges(scene.edges);
  }

  drawEdges(scene: Scene, camera: Camera, first: number, count: number): void {
    const framebuffer = this.layers[1]!;
    if (first === 0) this.regl.clear({ color: [0, 0, 0, 0], framebuffer });
    const total = scene.edges.length / 4;
    const alpha = edgeAlpha(total);
    const colour = [...unit(scene.edgeColour).map((value) => value * alpha), alpha];
    const drawn = Math.min(count, total - first);
    if (drawn > 0) {
      this.lines({ ...this.view, camera: numbers(camera), colour, buffer: "edges", offset: 2 * first, count: 2 * drawn, framebuffer });
    }
  }

  showEdges(camera: Camera): void {
    this.layers.reverse();
    this.shown = { ...camera };
  }

  draw(scene: Scene, camera: Camera): void {
    const { regl, view } = this;
    regl.poll();
    regl.clear({ color: [...unit(scene.background), 1] });
    if (this.shown) {
      const { width, height } = this.canvas;
      const zoom = camera.scale / this.shown.scale;
      const left = camera.x - this.shown.x * zoom;
      const top = camera.y - this.shown.y * zoom;
      const box = [left, top + height * zoom, left + width * zoom, top];
      this.layer({ layer: this.layers[0]!, box: box.map((value, i) => (i % 2 ? 1 - (2 * value) / height : (2 * value) / width - 1)) });
    }
    const common = { ...view, camera: numbers(camera) };
    if (scene.chosenEdges.length) {
      const colour = [...unit(scene.accent), 1];
      this.lines({ ...common, colour, buffer: "chosen", offset: 0, count: scene.chosenEdges.length / 2, framebuffer: null });
    }
    const radius = nodeRadius(scene, camera);
    const rim = unit(scene.background);
    this.points({ ...common, radius, rim, offset: 0, count: scene.positions.length / 2 });
    if (scene.chosen !== null) {
      this.points({ ...common, radius: radius * 1.6 + 3, rim: unit(scene.accent), offset: scene.chosen, count: 1 });
      this.points({ ...common, radius: radius * 1.6, rim, offset: scene.chosen, count: 1 });
    }
  }

  close(): void {
    this.regl.destroy();
  }
}

function numbers(camera: Camera): number[] {
  return [camera.scale, camera.x, camera.y];
}

function edgeAlpha(count: number): number {
  return Math.min(0.6, Math.max(0.09, 12 / Math.sqrt(count + 1)));
}

export function nodeRadius(scene: Scene, camera: Camera): number {
  return Math.min(26, Math.max(2.5, scene.radius * camera.scale));
}

/** The same drawing without WebGL. */
class CanvasRenderer implements Renderer {
  readonly kind = "2D canvas";
  readonly canvas = document.createElement("canvas");
  private readonly context = this.canvas.getContext("2d", { alpha: false })!;
  private readonly layers = [document.createElement("canvas"), document.createElement("canvas")];
  private shown: Camera | null = null;

  resize(width: number, height: number): void {
    for (const canvas of [this.canvas, ...this.layers]) {
      canvas.width = width;
      canvas.height = height;
    }
    this.shown = null;
  }

  load(): void {
    // the scene is read when it is drawn
  }

  drawEdges(scene: Scene, camera: Camera, first: number, count: number): void {
    const context = this.layers[1]!.getContext("2d")!;
    if (first === 0) context.clearRect(0, 0, this.canvas.width, this.canvas.height);
    context.strokeStyle = `rgba(${scene.edgeColour.join(",")},${edgeAlpha(scene.edges.length / 4)})`;
    this.lines(context, scene.edges.subarray(4 * first, 4 * (first + count)), camera);
  }

  private lines(context: CanvasRenderingContext2D, edges: Float32Array, { scale, x, y }: Camera): void {
    context.beginPath();
    for (let i = 0; i < edges.length; i += 4) {
      context.moveTo(edges[i]! * scale + x, edges[i + 1]! * scale + y);
      context.lineTo(edges[i + 2]! * scale + x, edges[i + 3]! * scale + y);
    }
    context.stroke();
  }

  showEdges(camera: Camera): void {
    this.layers.reverse();
    this.shown = { ...camera };
  }

  draw(scene: Scene, camera: Camera): void {
    const { context, canvas } = this;
    context.fillStyle = `rgb(${scene.background.join(",")})`;
    context.fillRect(0, 0, canvas.width, canvas.height);
    if (this.shown) {
      const zoom = camera.scale / this.shown.scale;
      const [left, top] = [camera.x - this.shown.x * zoom, camera.y - this.shown.y * zoom];
      context.drawImage(this.layers[0]!, left, top, canvas.width * zoom, canvas.height * zoom);
    }
    context.strokeStyle = `rgb(${scene.accent.join(",")})`;
    this.lines(context, scene.chosenEdges, camera);
    const radius = nodeRadius(scene, camera);
    for (let i = 0; i < scene.shapes.length; i++) this.disc(scene, camera, i, radius);
    if (scene.chosen !== null) {
      this.disc(scene, camera, scene.chosen, radius * 1.6);
      context.lineWidth = 3;
      context.stroke();
      context.lineWidth = 1;
    }
  }

  private disc(scene: Scene, camera: Camera, i: number, radius: number): void {
    const { context } = this;
    const colour = `rgb(${scene.colours.subarray(3 * i, 3 * i + 3).join(",")})`;
    context.beginPath();
    context.arc(scene.positions[2 * i]! * camera.scale + camera.x, scene.positions[2 * i + 1]! * camera.scale + camera.y, radius, 0, 7);
    context.fillStyle = scene.shapes[i] ? `rgb(${scene.background.join(",")})` : colour;
    context.fill();
    if (scene.shapes[i]) {
      const before = context.strokeStyle;
      context.strokeStyle = colour;
      context.lineWidth = 3;
      context.stroke();
      context.lineWidth = 1;
      context.strokeStyle = before;
    }
  }

  close(): void {
    this.canvas.remove();
  }
}
