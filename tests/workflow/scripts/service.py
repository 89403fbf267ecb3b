"""A stand-in for an inference server: the endpoints of vLLM's that a script needs to generate, over plain HTTP."""

import argparse
import json
import os
import signal
import time
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

ANSWERS = {"/health": {}, "/v1/models": {"data": [{"id": "stand-in"}]}, "/get_world_size": {"world_size": 1}}


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.answer(ANSWERS.get(self.path))

    def do_POST(self) -> None:
        request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        prompts = request["prompt"] if self.path == "/v1/completions" else []
        choices = [{"text": prompt[::-1], "index": index} for index, prompt in enumerate(prompts)]
        self.answer({"choices": choices, "id": str(os.getpid())} if prompts else None)

    def answer(self, found: object) -> None:
        body = json.dumps(found).encode()
        self.send_response(404 if found is None else 200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *arguments: object) -> None:
        pass


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--host")
    parser.add_argument("--port", type=int)
    parser.add_argument("--load_seconds", type=float, default=0)
    options = parser.parse_args()
    print(f"loading {os.environ['SHARDMAKE_BASE']} in process {os.getpid()}", flush=True)
    time.sleep(options.load_seconds)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    print("serving", flush=True)
    try:
        server.serve_forever()
    except KeyboardInterrupt:
        print("ended by", signal.SIGINT.name, flush=True)


if __name__ == "__main__":
    main()
