"use strict";
// Shows a case at a time: a panel for each of its label maps, with one crosshair in all of them.
const viewed = JSON.parse(document.getElementById("viewed").textContent);
const [chooser, opacity] = ["case", "opacity"].map((name) => document.getElementById(name));
const hidden = new Set(), panels = [];

async function unpack(name) {
  const text = atob(document.getElementById(name).textContent), bytes = new Uint8Array(text.length);
  for (let place = 0; place < text.length; place++) bytes[place] = text.charCodeAt(place);
  const unpacked = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  return new Response(unpacked).arrayBuffer();
}

function create(name, parent, text = "") {
  const element = parent.appendChild(document.createElement(name));
  element.textContent = text;
  return element;
}

function colours() {
  const part = (place) => [0, ...viewed.labels.map((label) => label.colour[place])];
  const A = [0, ...viewed.labels.map((label) => (hidden.has(label) ? 0 : 255))];
  // NiiVue draws nothing with the first 1/128 of the colours, where the background would lie among 64 labels or more.
  return { R: part(0), G: part(1), B: part(2), A, I: A.map((_, index) => index || -Math.ceil(A.length / 64)) };
}

function paint(panel) {
  if (panel.nv.volumes.length < 2) return;
  panel.nv.volumes[1].setColormapLabel(colours());
  panel.nv.setOpacity(1, Number(opacity.value));
}

function describe(panel) {
  const [image, labels] = panel.nv.volumes, position = panel.nv.frac2mm(panel.nv.scene.crosshairPos).slice(0, 3);
  const read = (volume) => volume.getValue(...volume.mm2vox(position));
  const label = labels && read(labels);
  const place = [...position].map((part) => part.toFixed(1)).join(", ");
  const name = label === undefined ? "" : label ? `: ${viewed.labels[label - 1].name}` : ": background";
  panel.output.textContent = `(${place}) mm, value ${Number(read(image).toPrecision(6))}${name}`;
}

function follow(moved) {
  for (const panel of panels.filter((one) => !one.figure.hidden)) {
    if (panel !== moved) {
      panel.nv.scene.crosshairPos = [...moved.nv.scene.crosshairPos];
      panel.nv.scene.pan2Dxyzmm = [...moved.nv.scene.pan2Dxyzmm];
      panel.nv.drawScene();
    }
    describe(panel);
  }
}

async function open() {
  const figure = create("figure", document.querySelector("main")), caption = create("figcaption", figure);
  const panel = { figure, title: create("b", caption), output: create("output", caption) };
  panel.nv = new niivue.Niivue({
    dragAndDropEnabled: false, loadingText: "", logLevel: "error", multiplanarShowRender: 0,
    crosshairColor: [1, 1, 0.4, 0.7], crosshairWidth: 0.4, crosshairWidthUnit: "percent", isNearestInterpolation: true, isRadiologicalConvention: true,
  });
  await panel.nv.attachToCanvas(create("canvas", create("div", figure)));
  panel.nv.onLocationChange = () => panel.nv.volumes.length && follow(panel);
  return panel;
}

async function fill(panel, image, layer) {
  for (const volume of [...panel.nv.volumes].reverse()) panel.nv.removeVolume(volume);
  panel.title.textContent = layer ? layer.title : "image";
  panel.nv.addVolume(await niivue.NVImage.new(image, "image.nii", "gray"));
  if (layer) panel.nv.addVolume(await niivue.NVImage.new(await unpack(layer.volume), "labels.nii", "gray"));
  paint(panel);
}

async function show(number) {
  delete document.body.dataset.shown;
  const chosen = viewed.cases[number], layers = chosen.layers.length ? chosen.layers : [null];
  const image = await unpack(chosen.image);
  while (panels.length < layers.length) panels.push(await open());
  for (const [place, panel] of panels.entries()) {
    panel.figure.hidden = place >= layers.length;
    if (!panel.figure.hidden) await fill(panel, image, layers[place]);
  }
  panels[0].nv.scene.crosshairPos = panels[0].nv.mm2frac(chosen.centre);
  panels[0].nv.drawScene();
  follow(panels[0]);
  document.getElementById("note").textContent = chosen.note;
  document.body.dataset.shown = chosen.title;
}

for (const label of viewed.labels.filter((one) => one.occurs)) {
  const line = create("label", document.getElementById("labels")), box = create("input", line);
  Object.assign(box, { type: "checkbox", checked: true });
  create("i", line).style.background = `rgb(${label.colour})`;
  line.append(label.name);
  box.addEventListener("change", () => {
    hidden[box.checked ? "delete" : "add"](label);
    panels.forEach(paint);
  });
}
for (const [number, one] of viewed.cases.entries()) create("option", chooser, one.title).value = number;
opacity.addEventListener("input", () => panels.forEach(paint));
let showing = show(0);
chooser.addEventListener("change", () => { showing = showing.then(() => show(Number(chooser.value))); });
