//! `haul doctor`.
use crate::arguments::DoctorArguments;
use crate::output::Failure;
use std::process::ExitCode;

pub fn run(_arguments: &DoctorArguments) -> Result<ExitCode, Failure> {
    Err(Failure::failed("not yet"))
}
