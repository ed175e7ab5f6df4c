// llama.cpp through node-llama-cpp (npm install node-llama-cpp), plain, on a GGUF file.
// Started in a directory with node_modules, as `node peer_llama_cpp.mjs SETTINGS`; see protocol.py.
import {readFileSync} from "node:fs";
import {createRequire} from "node:module";
import readline from "node:readline";
import {pathToFileURL} from "node:url";

const require = createRequire(`${process.cwd()}/`);
const {getLlama} = await import(pathToFileURL(require.resolve("node-llama-cpp")));
const {version} = JSON.parse(readFileSync("node_modules/node-llama-cpp/package.json"));
const settings = JSON.parse(readFileSync(process.argv[2]));
if (settings.drafter !== "none") {
    console.error("node-llama-cpp's n-gram drafter is not measured");
    process.exit(1);
}
const {batch_size: batch, max_length: length, prompts, num_threads: threads} = settings;
const llama = await getLlama({gpu: false, build: "never", maxThreads: threads, logLevel: "error"});
const model = await llama.loadModel({modelPath: settings.model, useMmap: true});
const context = await model.createContext({contextSize: length, sequences: batch, threads, batchSize: 1024});
const sequences = Array.from({length: batch}, () => context.getSequence());

async function one(ids, sequence, maxTokens) {
    await sequence.clearHistory();
    const out = [];
    for await (const token of sequence.evaluate(ids, {temperature: 0, yieldEogToken: true})) {
        out.push(token);
        if (out.length >= maxTokens) break;
    }
    return out;
}

async function generate(list, maxTokens) {
    const outputs = new Array(list.length);
    let next = 0;
    await Promise.all(sequences.map(async (sequence) => {
        while (next < list.length) {
            const index = next++;
            outputs[index] = await one(list[index], sequence, maxTokens);
        }
    }));
    return outputs;
}

const say = (record) => console.log("PEER " + JSON.stringify(record));
await generate(prompts.slice(0, batch), 2);
say({versions: {"node-llama-cpp": version}, arithmetic: "the file's quantisation"});
for await (const line of readline.createInterface({input: process.stdin})) {
    const start = performance.now();
    const outputs = await generate(prompts, Number(line));
    const seconds = (performance.now() - start) / 1000;
    say({seconds, outputs, peak_bytes: 1024 * process.resourceUsage().maxRSS});
}
process.exit(0);
