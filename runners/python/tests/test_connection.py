import tempfile
import unittest
from pathlib import Path

from relay_runner import Connection, read_connection


class ConnectionTest(unittest.TestCase):
    def test_a_connection_file_names_url_and_key(self):
        with tempfile.TemporaryDirectory() as folder:
            file = Path(folder) / "connection.json"
            with self.assertRaisesRegex(FileNotFoundError, "no broker runs"):
                read_connection(file)
            file.write_text('{"url": 5}')
            with self.assertRaisesRegex(ValueError, "not a connection file"):
                read_connection(file)
            file.write_text('{"url":"http://127.0.0.1:1","port":1,"api_key":"br_1","pid":1}')
            self.assertEqual(read_connection(file), Connection("http://127.0.0.1:1", "br_1"))
            self.assertNotIn("br_1", repr(read_connection(file)))
