"""The settings that define the result of a training."""

from shardmake.run.settings_digest import result_settings, settings_digest
from tests.unit.plans import make_plan, make_training_settings


def test_values_of_own_files_count_if_they_can_change_the_result() -> None:
    plan, plain = make_plan("zero2"), make_training_settings()
    own = {"communication_data_type": "fp32", "zero_optimization.reduce_bucket_size": 4096, "debug": True}
    with_files = plain.model_copy(update={"own_files": own})
    before, after = (result_settings(settings, plan, "data") for settings in (plain, with_files))
    assert after.items() - before.items() == {("communication_data_type", "fp32")}
    assert settings_digest(before) != settings_digest(after)


def test_another_chat_template_is_another_training() -> None:
    plan, plain = make_plan("zero2"), make_training_settings()
    template = plain.model.model_copy(update={"chat_template": "{{ messages }}"})
    before, after = (result_settings(s, plan, "data") for s in (plain, plain.model_copy(update={"model": template})))
    assert [key for key, _ in after.items() - before.items()] == ["content of the chat template"]


def test_a_training_that_may_end_early_is_another_training() -> None:
    """Its last checkpoint would count as the end of a training with more patience, too."""
    plan, plain = make_plan("zero2"), make_training_settings()
    checkpoints = plain.checkpoints.model_copy(update={"early_stopping": 2})
    before, after = (
        result_settings(s, plan, "data") for s in (plain, plain.model_copy(update={"checkpoints": checkpoints}))
    )
    assert after.items() - before.items() == {("checkpoints.early_stopping", "2")}


def test_another_micro_batch_is_another_training_only_if_the_loss_compares_its_examples() -> None:
    small, large = make_plan("zero2"), make_plan("zero3", micro_batch_size=4, gradient_accumulation_steps=1)
    for objective, differs in (("sft", set()), ("kto", {("micro batch", "4 on 4 ranks")})):
        settings = make_training_settings().model_copy(update={"objective": objective})
        before, after = (result_settings(settings, plan, "data") for plan in (small, large))
        assert after.items() - before.items() == differs
