import * as twgl from "twgl.js";
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
  const canvas = document.createElement("canvas");
  const gl = canvas.getContext("webgl", { antialias: false, alpha: false, depth: false, stencil: false });
  return gl ? new WebGLRenderer(canvas, gl) : new CanvasRenderer();
}

const unit = (colour: Colour): Colour => colour.map((value) => value / 255) as Colour;

const PLACE = `
  precision highp float;
  uniform vec3 camera; uniform vec2 size;
  vec4 placed(vec2 p) { return vec4((p * camera.x + camera.yz) / size * vec2(2.0, -2.0) + vec2(-1.0, 1.0), 0.0, 1.0); }`;
const LINES = [
  `${PLACE} attribute vec2 p; void main() { gl_Position = placed(p); }`,
  "precision mediump float; uniform vec4 colour; void main() { gl_FragColor = colour; }",
];
const LAYER = [
  `precision highp float; attribute vec2 p; uniform vec4 box; varying vec2 at;
   void main() { at = p; gl_Position = vec4(mix(box.xy, box.zw, p), 0.0, 1.0); }`,
  "precision mediump float; uniform sampler2D layer; varying vec2 at; void main() { gl_FragColor = texture2D(layer, at); }",
];
const POINTS = [
  `${PLACE} attribute vec2 p; attribute vec3 c; attribute float s; uniform float radius;
   varying vec3 colour; varying float ring;
   void main() { colour = c; ring = s; gl_PointSize = 2.0 * radius + 2.0; gl_Position = placed(p); }`,
  `precision mediump float; varying vec3 colour; varying float ring; uniform float reach; uniform vec3 rim;
   void main() {
     float away = length(gl_PointCoord - 0.5) * (2.0 * reach + 2.0);
     float inside = clamp(reach - away + 0.5, 0.0, 1.0);
     if (inside <= 0.0) discard;
     float hole = ring * clamp(reach * 0.55 - away + 0.5, 0.0, 1.0);
     float border = (1.0 - ring) * clamp(away - reach + 1.5, 0.0, 1.0);
     gl_FragColor = vec4(mix(colour, rim, max(hole, border * 0.8)) * inside, inside);
   }`,
];

class WebGLRenderer implements Renderer {
  readonly kind = "WebGL";
  private readonly programs;
  private readonly layers: twgl.FramebufferInfo[];
  private readonly nodes: twgl.BufferInfo;
  private readonly edges: twgl.BufferInfo;
  private readonly chosen: twgl.BufferInfo;
  private readonly corners: twgl.BufferInfo;
  private shown: Camera | null = null;

  constructor(readonly canvas: HTMLCanvasElement, private readonly gl: WebGLRenderingContext) {
    const program = (sources: string[]) => twgl.createProgramInfo(gl, sources);
    this.programs = { lines: program(LINES), layer: program(LAYER), points: program(POINTS) };
    const attachments = [{ format: gl.RGBA, min: gl.LINEAR, wrap: gl.CLAMP_TO_EDGE }];
    this.layers = [0, 1].map(() => twgl.createFramebufferInfo(gl, attachments, 1, 1));
    const column = (numComponents: number) => ({ numComponents, data: new Float32Array(4 * numComponents), drawType: gl.DYNAMIC_DRAW });
    this.nodes = twgl.createBufferInfoFromArrays(gl, { p: column(2), c: column(3), s: column(1) });
    this.edges = twgl.createBufferInfoFromArrays(gl, { p: column(2) });
    this.chosen = twgl.createBufferInfoFromArrays(gl, { p: column(2) });
    this.corners = twgl.createBufferInfoFromArrays(gl, { p: { numComponents: 2, data: [0, 0, 1, 0, 0, 1, 1, 1] } });
    gl.enable(gl.BLEND);
    gl.blendFunc(gl.ONE, gl.ONE_MINUS_SRC_ALPHA);
  }

  resize(width: number, height: number): void {
    this.canvas.width = width;
    this.canvas.height = height;
    const { gl } = this;
    const attachments = [{ format: gl.RGBA, min: gl.LINEAR, wrap: gl.CLAMP_TO_EDGE }];
    for (const layer of this.layers) twgl.resizeFramebufferInfo(gl, layer, attachments, width, height);
    this.shown = null;
  }

  load(scene: Scene, edgesChanged: boolean): void {
    const { gl } = this;
    const set = (info: twgl.BufferInfo, name: string, data: Float32Array) => {
      gl.bindBuffer(gl.ARRAY_BUFFER, info.attribs![name]!.buffer!);
      gl.bufferData(gl.ARRAY_BUFFER, data, gl.DYNAMIC_DRAW);
    };
    set(this.nodes, "p", scene.positions);
    set(this.nodes, "c", scene.colours.map((value) => value / 255));
    set(this.nodes, "s", scene.shapes);
    set(this.chosen, "p", scene.chosenEdges);
    if (edgesChanged) set(this.edges, "p", scene.edges);
  }

  private run(program: twgl.ProgramInfo, info: twgl.BufferInfo, uniforms: Record<string, unknown>, mode: number, count: number, offset = 0): void {
    if (count <= 0) return;
    const { gl } = this;
    gl.useProgram(program.program);
    twgl.setBuffersAndAttributes(gl, program, info);
    twgl.setUniforms(program, { size: [this.canvas.width, this.canvas.height], ...uniforms });
    twgl.drawBufferInfo(gl, info, mode, count, offset);
  }

  drawEdges(scene: Scene, camera: Camera, first: number, count: number): void {
    const { gl } = this;
    twgl.bindFramebufferInfo(gl, this.layers[1]!);
    if (first === 0) {
      gl.clearColor(0, 0, 0, 0);
      gl.clear(gl.COLOR_BUFFER_BIT);
    }
    const total = scene.edges.length / 4;
    const alpha = edgeAlpha(total);
    const colour = [...unit(scene.edgeColour).map((value) => value * alpha), alpha];
    const drawn = Math.min(count, total - first);
    this.run(this.programs.lines, this.edges, { camera: numbers(camera), colour }, gl.LINES, 2 * drawn, 2 * first);
    twgl.bindFramebufferInfo(gl, null);
  }

  showEdges(camera: Camera): void {
    this.layers.reverse();
    this.shown = { ...camera };
  }

  draw(scene: Scene, camera: Camera): void {
    const { gl } = this;
    const { width, height } = this.canvas;
    gl.viewport(0, 0, width, height);
    gl.clearColor(...unit(scene.background), 1);
    gl.clear(gl.COLOR_BUFFER_BIT);
    if (this.shown) {
      const zoom = camera.scale / this.shown.scale;
      const left = camera.x - this.shown.x * zoom;
      const top = camera.y - this.shown.y * zoom;
      const box = [left, top + height * zoom, left + width * zoom, top].map((value, i) => (i % 2 ? 1 - (2 * value) / height : (2 * value) / width - 1));
      this.run(this.programs.layer, this.corners, { layer: this.layers[0]!.attachments[0], box }, gl.TRIANGLE_STRIP, 4);
    }
    const view = numbers(camera);
    this.run(this.programs.lines, this.chosen, { camera: view, colour: [...unit(scene.accent), 1] }, gl.LINES, scene.chosenEdges.length / 2);
    const points = (reach: number, rim: Colour, count: number, offset: number) =>
      this.run(this.programs.points, this.nodes, { camera: view, radius: reach, reach, rim: unit(rim) }, gl.POINTS, count, offset);
    const radius = nodeRadius(scene, camera);
    points(radius, scene.background, scene.shapes.length, 0);
    if (scene.chosen !== null) {
      points(radius * 1.6 + 3, scene.accent, 1, scene.chosen);
      points(radius * 1.6, scene.background, 1, scene.chosen);
    }
  }

  close(): void {
    this.gl.getExtension("WEBGL_lose_context")?.loseContext();
  }
}

function numbers(camera: Camera): number[] {
  return [camera.scale, camera.x, camera.y];
}

function edgeAlpha(count: number): number {
  return Math.min(0.6, Math.max(0.06, 6 / Math.sqrt(count + 1)));
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
