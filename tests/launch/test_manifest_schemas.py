"""Printed manifests fit the published schemas, and a parser of YAML reads them as the parser of these tests does.

``./scripts/test-inputs`` runs these with PyYAML, kubernetes-validate and kubeflow-trainer-api, where none may be skipped.
"""

import importlib
import os
import shlex

import pytest

from lockstep.distributed.cluster.secret import SECRET
from lockstep.launch.job_scripts import JOB_SCRIPTS
from tests.launch.block_yaml import documents
from tests.launch.test_job_scripts import WORDS, YAML, job, job_in


def package(name):
    """A package that reads manifests; ./scripts/test-inputs has these, and none may be missing there."""
    if os.environ.get("LOCKSTEP_ALL_INPUTS"):
        return importlib.import_module(name)
    return pytest.importorskip(name, reason=f"{name} is not installed: ./scripts/test-inputs runs this")


@pytest.mark.parametrize("name", YAML)
@pytest.mark.parametrize("image", [None, 'registry:5000/a"b@sha256:0'])
def test_a_parser_of_yaml_reads_the_manifest_alike(name, image):
    yaml = package("yaml")
    text = JOB_SCRIPTS[name](job(container_image=image))
    assert list(yaml.safe_load_all(text)) == documents(text)


@pytest.mark.parametrize("version", ["1.31", "1.34"])
@pytest.mark.parametrize("least", [None, 1])
def test_the_manifest_fits_the_published_schema(version, least):
    validator = package("kubernetes_validate")
    for document in documents(JOB_SCRIPTS["kubernetes"](job(min_nodes=least))):
        validator.validate(document, version, strict=True)
    for name in ("jobset", "trainjob"):
        job_of_set = {"apiVersion": "batch/v1", "kind": "Job", "metadata": {"name": "x"}, "spec": job_in(name)[1]}
        validator.validate(job_of_set, version, strict=True)


KUBEFLOW = {"TrainingRuntime": "TrainerV1alpha1TrainingRuntime", "TrainJob": "TrainerV1alpha1TrainJob"}


def known_part(document, model=None):
    """What the published models of Kubeflow Trainer and JobSet know of a document."""
    models = vars(package("kubeflow_trainer_api.models"))
    return models[model or KUBEFLOW[document["kind"]]].from_dict(document).to_dict()


def test_the_trainjob_and_the_jobset_fit_the_published_models():
    for document in documents(JOB_SCRIPTS["trainjob"](job())):
        assert known_part(document) == document
    jobset = documents(JOB_SCRIPTS["jobset"](job()))[-1]["spec"]
    assert known_part(jobset, "JobsetV1alpha2JobSetSpec") == jobset


@pytest.mark.parametrize("name", ["onJobFailureReasons", "runtimeRef", "containerName", "numNodes"])
def test_a_misspelled_field_does_not_fit(name):
    text = JOB_SCRIPTS["trainjob"](job())
    assert name in text
    wrong = documents(text.replace(f"{name}:", f"{name}s:"))
    with pytest.raises((ValueError, AssertionError)):
        assert [known_part(document) for document in wrong] == wrong


def test_a_parser_of_yaml_reads_the_skypilot_task():
    task = package("yaml").safe_load(JOB_SCRIPTS["skypilot"](job(path="a\nb.py")))
    assert task["resources"] == {"job_recovery": {"max_restarts_on_errors": 1, "recover_on_exit_codes": [75]}}
    assert task["secrets"] == {SECRET: None}
    words = shlex.split(task["run"].split("exec ")[1])
    assert words[:2] == ["lockstep", "run"]
    assert words[-len(WORDS) - 1 :] == ["a\nb.py", *WORDS]
