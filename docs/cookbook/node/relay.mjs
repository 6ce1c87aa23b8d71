// Relays each client to a host, copied: node relay.mjs LISTEN_PORT HOST PORT
//
// Node.js does not offer splice. For many bytes, use haul proxy.
import { connect, createServer } from "node:net";

const [listenPort, host, port] = process.argv.slice(2);
const server = createServer({ allowHalfOpen: true }, (client) => {
  const upstream = connect({ host, port: Number(port), allowHalfOpen: true });
  for (const [from, to] of [
    [client, upstream],
    [upstream, client],
  ]) {
    from.pipe(to);
    // A reset, so that no peer takes a truncated stream for a whole one.
    from.on("error", () => to.resetAndDestroy());
  }
});
server.listen(Number(listenPort), "127.0.0.1", () => {
  console.log("listening at port", server.address().port);
});
