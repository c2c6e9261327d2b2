"""The metadata service of an instance, as a real server on this machine."""

import threading
import time
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer


class Service:
    """What an instance's metadata service does: tokens, and 404 until there is a notice."""

    def __init__(self):
        self.notice, self.tokens, self.asked, self.delay = None, [], [], 0.0
        service = self

        class Handler(BaseHTTPRequestHandler):
            def do_PUT(self):
                assert self.path == "/latest/api/token"
                assert int(self.headers["X-aws-ec2-metadata-token-ttl-seconds"]) > 60
                service.tokens.append(f"token{len(service.tokens)}")
                self.answer(200, service.tokens[-1])

            def do_GET(self):
                time.sleep(service.delay)
                service.asked.append(self.path)
                if self.headers["X-aws-ec2-metadata-token"] != service.tokens[-1]:
                    self.answer(401, "no such token")
                elif service.notice is None:
                    self.answer(404, "not found")
                else:
                    self.answer(200, service.notice)

            def answer(self, status, text):
                self.send_response(status)
                self.send_header("Content-Length", str(len(text)))
                self.end_headers()
                self.wfile.write(text.encode())

            def log_message(self, *arguments):
                pass

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.endpoint = f"http://127.0.0.1:{self.server.server_port}"


@contextmanager
def serving():
    service = Service()
    thread = threading.Thread(target=service.server.serve_forever, args=(0.01,))
    thread.start()
    try:
        yield service
    finally:  # the program would wait for the thread
        service.server.shutdown()
        thread.join()
        service.server.server_close()
