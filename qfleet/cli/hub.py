"""The command `share`: a trained policy with model card and video for the Hugging Face Hub."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from pathlib import Path
from typing import Any

from qfleet.cli.output import clean_stdout, print_error, print_result
from qfleet.cli.play import RolloutFrames, describe_result, write_video

FPS = 30


def share(args: Namespace) -> int:
    """Write a folder with policy, model card and video, and upload it unless --dry-run is given."""
    from qfleet.core.errors import UserError
    from qfleet.runs.hub import REPO

    run, repo = args.words
    if not REPO.fullmatch(repo):
        raise UserError(f"{repo!r} is not the name of a repository: write USER/NAME with letters, digits, dots, "
                        "dashes and underscores")
    hub = None if args.dry_run else _hub()
    with tempfile.TemporaryDirectory(prefix="qfleet-share-") as private:
        folder = Path(args.out) if args.out else Path(private) / "policy"
        if args.dry_run and not args.out:
            folder = Path(repo.rpartition("/")[2])
        with clean_stdout(args):
            line = prepare(args, run, repo, folder)
        url = None if hub is None else _upload(hub, repo, folder, args.private)
        kept = folder if args.out or args.dry_run else None
        print_result(args, [line, *([str(kept)] if kept else []), *([url] if url else [])],
                     {"repo": repo, "folder": kept and str(kept), "url": url})
    return 0


def prepare(args: Namespace, run: str, repo: str, folder: Path) -> str:
    """Write policy, model card and video to a new folder; returns the evaluation as text."""
    from qfleet import api
    from qfleet.config import parse_mapping
    from qfleet.report.model_card import VIDEO_FILE, model_card
    from qfleet.runs.checkpoint import open_checkpoint

    api.export(run, folder, args.which, root=args.root)
    result = api.evaluate(run, episodes=args.episodes, seed=args.seed, which=args.which, root=args.root,
                          trust=args.trust)
    try:
        write_video(RolloutFrames(run, 1, args.seed, args.which, args.trust, args.root), folder / VIDEO_FILE, FPS)
    except Exception as error:  # the policy is shared without a video
        print_error(f"no video: {error or type(error).__name__}")
    policy = open_checkpoint(folder)
    trained = {"steps": policy.manifest.step, "updates": policy.manifest.updates}
    settings = parse_mapping(policy.config_text, "config.yaml")
    (folder / "README.md").write_text(
        model_card(repo, settings, result.to_json(), trained, (folder / VIDEO_FILE).exists()), encoding="utf-8"
    )
    return describe_result(result)


def _hub() -> Any:
    from qfleet.core.errors import UserError

    try:
        import huggingface_hub
    except ImportError:
        raise UserError("uploading needs huggingface_hub: pip install 'qfleet[hub]', or only write the folder with "
                        "--dry-run") from None
    return huggingface_hub


def _upload(hub: Any, repo: str, folder: Path, private: bool) -> str:
    from qfleet.core.errors import UserError

    api = hub.HfApi(library_name="qfleet")
    try:
        where = api.create_repo(repo, private=private, exist_ok=True)
        api.upload_folder(repo_id=repo, folder_path=str(folder), commit_message="Add policy, model card and video")
    except Exception as error:  # from the library, the network or the Hub
        reason = next((line for line in str(error).splitlines() if line.strip()), type(error).__name__)
        raise UserError(f"cannot upload to {repo}: {reason} (log in with `hf auth login`)") from error
    return str(where)
