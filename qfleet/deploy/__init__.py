"""Policies as files for other runtimes: ONNX and TorchScript."""
