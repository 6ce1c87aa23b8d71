// Sends a file: haul run -- node send_file.mjs FILE HOST PORT
//
// Node.js does not offer sendfile: a stream reads the file into memory and writes the memory. In
// front of large files, use a server that calls sendfile, such as nginx or haul serve.
import { createReadStream } from "node:fs";
import { connect } from "node:net";
import { pipeline } from "node:stream/promises";

const [path, host, port] = process.argv.slice(2);
await pipeline(createReadStream(path, { highWaterMark: 1 << 20 }), connect(Number(port), host));
