//! Writes the client stubs of a set of descriptors, as protoc writes it: `anarchon-stubs DESCRIPTORS DIR`.

use std::{env, error::Error, fs};

use prost::Message;
use prost_types::FileDescriptorSet;

fn main() -> Result<(), Box<dyn Error>> {
    let mut arguments = env::args_os().skip(1);
    let (Some(descriptors), Some(out)) = (arguments.next(), arguments.next()) else {
        return Err("it takes a file of descriptors and a directory".into());
    };
    let descriptors = FileDescriptorSet::decode(fs::read(descriptors)?.as_slice())?;
    tonic_prost_build::configure()
        .build_server(false)
        .out_dir(out)
        .compile_fds(descriptors)?;
    Ok(())
}
