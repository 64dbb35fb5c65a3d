"""The hook `mlflow`: a run of Modelyard is one run in MLflow, however often it is resumed."""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from modelyard import storage
from modelyard.config.backend import is_installed
from modelyard.config.yaml_file import inline
from modelyard.errors import UserError
from modelyard.loop.catalog import MLflowOptions
from modelyard.loop.tracking import (
    Description,
    Memo,
    NotReadyError,
    Point,
    Tracker,
    check_address,
    result_files,
    without_password,
)
from modelyard.run.directory import RunDirectory

_METRICS_AT_ONCE = 1000
_PARAMS_AT_ONCE = 100
_LONGEST_VALUE = 500
"""Characters of a parameter that every version of the server accepts."""
_TAG = "modelyard."
_RUN_TAG = f"{_TAG}run_id"
_DATABASES = ("sqlite", "postgresql", "mysql", "mssql")
_SETTINGS = {
    "MLFLOW_HTTP_REQUEST_MAX_RETRIES": "1",  # by default, it is silent for four minutes
    "MLFLOW_HTTP_REQUEST_TIMEOUT": "20",
    "MLFLOW_SUPPRESS_PRINTING_URL_TO_STDOUT": "true",  # where --json prints
}
"""MLflow's own settings, if the user has none."""


class MLflow(Tracker):
    """Sends metrics, options, tags and results to MLflow."""

    options: MLflowOptions
    package = "mlflow"
    needs_training = False

    def check(self) -> None:
        """Checks the address, and a store on this machine."""
        uri = self.options.tracking_uri or os.environ.get("MLFLOW_TRACKING_URI")
        where = f"hook {self.name}: tracking_uri" if self.options.tracking_uri else "MLFLOW_TRACKING_URI"
        scheme = uri.partition(":")[0].lower() if uri and ":" in uri else ""
        if uri and scheme in ("http", "https"):
            check_address(uri, where, "MLFLOW_TRACKING_USERNAME and MLFLOW_TRACKING_PASSWORD")
            return
        kind = scheme.partition("+")[0]
        if (uri is None or kind in _DATABASES) and not is_installed("sqlalchemy"):
            raise UserError(
                f"the hook {self.name} has no server to send to: give tracking_uri=http://…, or set "
                "MLFLOW_TRACKING_URI. To write to a database or to ./mlflow.db: pip install mlflow"
                if uri is None
                else f"{where}: {without_password(uri)!r} is a database, which needs all of MLflow: pip install mlflow"
            )
        if scheme.startswith("databricks"):
            return
        try:
            with _alone(uri):
                _client(self.options.tracking_uri).search_experiments(max_results=1)
        except Exception as error:
            reason = (str(error).strip().splitlines() or ["no message"])[0]
            shown = without_password(uri or "MLflow's default store")
            raise UserError(f"{where}: {shown!r} can't be used: {without_password(reason)}") from error

    def destination(self, directory: RunDirectory, about: Description, creates: bool, seconds: float) -> MLflowRun:
        """Makes the run."""
        for variable, value in _SETTINGS.items():
            os.environ.setdefault(variable, value)
        return MLflowRun(self.options, Memo(directory, self.name), about, creates, time.time() - seconds)

    def send_files(self, directory: RunDirectory, exports: Sequence[str]) -> Iterator[str]:
        """Sends small files as artifacts, and exports as artifacts or as a tag with their paths."""
        run = Memo(directory, self.name).run
        if run is None:
            raise UserError("MLflow has no run yet")
        client = _client(self.options.tracking_uri)
        for path in result_files(directory):
            client.log_artifact(run, str(path))
            yield path.name
        if exports:
            client.set_tag(run, f"{_TAG}exports", "; ".join(exports))
        for export in exports if self.options.artifacts else ():
            if storage.is_remote(export):
                continue
            path = Path(export)
            client.log_artifacts(run, str(path), f"{path.parent.name}/{path.name}")
            yield export


class MLflowRun:
    """A run in MLflow.

    Args:
        options: of the hook.
        memo: remembers the id of the run in MLflow.
        about: what MLflow shows.
        creates: whether it is made if MLflow does not have it; else another process makes it.
        began: the time at which training would have begun without pauses.
    """

    def __init__(self, options: MLflowOptions, memo: Memo, about: Description, creates: bool, began: float) -> None:
        self._options, self._memo, self._about, self._creates, self._began = options, memo, about, creates, began
        self._run = ""

    def open(self) -> dict[str, int]:
        """Finds or makes the run; returns the last step of each metric."""
        self._client = client = _client(self._options.tracking_uri)
        found = self._known_run() or self._search()
        if found is None:
            if not self._creates:
                raise NotReadyError
            found = client.create_run(self._experiment(), run_name=self._name, tags=self._tags())
        self._run = str(found.info.run_id)
        if self._creates:
            self._memo.write(run=self._run)
            client.update_run(self._run, status="RUNNING")
            self._describe({str(key): str(value) for key, value in found.data.params.items()})
        # The latest value of a metric is the one with the largest step.
        return {str(metric.key): int(metric.step) for metric in found.to_proto().data.metrics}

    def send(self, points: Sequence[Point]) -> None:
        """Sends values in calls of at most 1,000. The server takes a call as a whole or not at all."""
        from mlflow.entities import Metric

        metrics = [
            Metric(point.key, point.value, int(1000 * (self._began + point.seconds)), point.step) for point in points
        ]
        for start in range(0, len(metrics), _METRICS_AT_ONCE):
            self._client.log_batch(self._run, metrics=metrics[start : start + _METRICS_AT_ONCE])

    def close(self, status: str) -> None:
        """Sets the status."""
        if self._creates:
            self._client.set_terminated(self._run, status)

    @property
    def _name(self) -> str:
        return self._options.run_name or self._about.name

    def _known_run(self) -> Any:
        """Returns the run that is remembered, or that MLFLOW_RUN_ID names; None if MLflow does not have it."""
        from mlflow.exceptions import MlflowException

        known = self._memo.run or (os.environ.get("MLFLOW_RUN_ID") if self._creates else None)
        if known is None:
            return None
        try:
            run = self._client.get_run(known)
        except MlflowException as error:
            if error.error_code == "RESOURCE_DOES_NOT_EXIST":
                return None
            raise
        return run if run.info.lifecycle_stage == "active" else None

    def _search(self) -> Any:
        """Returns the run that a killed process made without remembering it."""
        condition = f"tags.`{_RUN_TAG}` = '{self._about.run_id}'"
        found = self._client.search_runs([self._experiment()], condition, max_results=1)
        return found[0] if found else None

    def _experiment(self) -> str:
        """Returns the id of the experiment, which is made if it is missing."""
        from mlflow.exceptions import MlflowException

        name = self._options.experiment or os.environ.get("MLFLOW_EXPERIMENT_NAME")
        if not self._options.experiment and os.environ.get("MLFLOW_EXPERIMENT_ID"):
            return os.environ["MLFLOW_EXPERIMENT_ID"]
        name = name or "Default"
        found = self._client.get_experiment_by_name(name)
        if found is None:
            try:
                return str(self._client.create_experiment(name))
            except MlflowException:  # another run made it at the same moment
                found = self._client.get_experiment_by_name(name)
                if found is None:
                    raise
        return str(found.experiment_id)

    def _tags(self) -> dict[str, str]:
        tags = {f"{_TAG}{key}": value for key, value in self._about.tags.items() if value}
        return tags | ({"mlflow.source.git.commit": self._about.commit} if self._about.commit else {})

    def _describe(self, known: dict[str, str]) -> None:
        """Sends options and tags. MLflow's parameters never change: a changed option is a tag."""
        from mlflow.entities import Param, RunTag

        tags, params = self._tags(), {}
        for key, value in self._about.options.items():
            text = value if isinstance(value, str) else inline(value)
            text = text if len(text) <= _LONGEST_VALUE else text[: _LONGEST_VALUE - 1] + "…"
            if key not in known:
                params[key] = text
            elif known[key] != text:
                tags[f"{_TAG}changed.{key}"] = text
        listed = [Param(key, value) for key, value in params.items()]
        for start in range(0, len(listed), _PARAMS_AT_ONCE):
            self._client.log_batch(self._run, params=listed[start : start + _PARAMS_AT_ONCE])
        self._client.log_batch(self._run, tags=[RunTag(key, value) for key, value in tags.items()])


@contextmanager
def _alone(uri: str | None) -> Iterator[None]:
    """Lets one process of this machine at a time open a SQLite store: the first one makes its tables, for seconds."""
    path = uri.partition(":///")[2].partition("?")[0] if uri else "mlflow.db"
    folder = Path(path).parent
    if (uri and not uri.startswith("sqlite")) or not folder.is_dir():
        yield
        return
    handle = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(handle, fcntl.LOCK_EX)
        yield
    finally:
        os.close(handle)


def _client(tracking_uri: str | None) -> Any:
    from mlflow import MlflowClient

    return MlflowClient(tracking_uri=tracking_uri)
