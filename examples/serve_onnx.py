"""A web service for an exported policy. It needs numpy and onnxruntime, neither torch nor qfleet.

    qfleet export my-run policy.onnx
    python serve_onnx.py policy.onnx 8421
    curl -d '{"obs": [[0.0, 0.1, 0.0, -0.1]]}' http://127.0.0.1:8421

A request has all inputs by name, each as a batch; the answer has the outputs by name.
"""

import json
import sys
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import numpy as np
import onnxruntime

session = onnxruntime.InferenceSession(sys.argv[1], providers=["CPUExecutionProvider"])
about = json.loads(session.get_modelmeta().custom_metadata_map["qfleet"])
outputs = [port["name"] for port in about["outputs"]]


class Policy(BaseHTTPRequestHandler):
    def do_POST(self):
        try:
            given = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            inputs = {port["name"]: np.asarray(given[port["name"]], port["dtype"]) for port in about["inputs"]}
            found = session.run(outputs, inputs)
            status, answer = 200, {name: value.tolist() for name, value in zip(outputs, found, strict=True)}
        except Exception as error:
            status, answer = 400, {"error": f"{type(error).__name__}: {error}"}
        self.send_response(status)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(answer).encode())


server = ThreadingHTTPServer(("127.0.0.1", int(sys.argv[2])), Policy)
print(f"{about['env']['id']} at http://127.0.0.1:{server.server_port}", flush=True)
server.serve_forever()
